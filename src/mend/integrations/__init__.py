"""One line for training loops of other libraries. Each module needs its own library, and nothing
else of mend imports them.

    from mend.integrations.transformers import MendCallback
    from mend.integrations.lightning import MendCallback
    from mend.integrations.accelerate import LocalSGD
"""
