"""config: all settings of a job, checked when the configuration is made. Only this package reads
MEND_* variables and the TOML file.

`settings` has the settings, `kinds` their possible values, `sources` where the values come from.
"""

from mend.config.settings import MendConfig, Setting, describe

__all__ = ["MendConfig", "Setting", "describe"]
