"""mend_lab: shows that mend is right. It is used from a checkout, and is not in the wheel.

It imports mend, and mend never imports it (tests/map.py).
"""
