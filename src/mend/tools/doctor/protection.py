"""What keeps others out of the job that these settings would start."""

from __future__ import annotations

import warnings

from mend.config.keyfile import MAKE_ONE, protection_of, secrets_of
from mend.config.settings import MendConfig
from mend.errors import ConfigError
from mend.tools.doctor.terms import Finding

_SAID = {
    "keys": "a key: traffic between racks is encrypted, and only who has the key is in",
    "loopback": "this rack listens on the loopback interface only; no key is needed",
}


def of_keys(config: MendConfig) -> list[Finding]:
    """Of a rack whose address is known; a script may still say it."""
    if config.rack is None and not config.sideband_addr:
        return []
    bind = config.bind_address
    protection = protection_of(config, bind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says follows
        try:
            secrets_of(config, bind)
        except ConfigError as error:
            return [Finding("problem", "keys", f"{error.field}: {error.rule}.", error.remedy)]
    if protection == "insecure":
        found = f"{bind} is open to whoever reaches it: MEND_INSECURE is set, and there is no key."
        return [Finding("note", "keys", found, f"{MAKE_ONE} Set MEND_KEY_FILE on every rack.")]
    if protection == "keys" and not config.encrypt_payloads:
        found = "a key: only who has it is in. Payloads are authenticated and not encrypted."
        remedy = "Leave encrypt_payloads out where weights must not be read on the way."
        return [Finding("note", "keys", found, remedy)]
    return [Finding("ok", "keys", _SAID[protection])]
