"""fragment: plans the fragments of a model, reads and writes their elements, and applies anchors.
The only package that accesses the model."""

from mend.fragment.apply import ApplyMode, realign
from mend.fragment.plan import build_plan, exchanged_parameters, plan_facts, tied_names, unwrap
from mend.fragment.view import FragmentView

__all__ = [
    "ApplyMode",
    "FragmentView",
    "build_plan",
    "exchanged_parameters",
    "plan_facts",
    "realign",
    "tied_names",
    "unwrap",
]
