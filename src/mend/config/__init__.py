"""config: every setting of a job, checked when it is made. The only reader of environment and TOML.

`settings` says which there are, `kinds` what a value may be, `sources` where it comes from.
"""

from mend.config.settings import MendConfig, Setting, describe

__all__ = ["MendConfig", "Setting", "describe"]
