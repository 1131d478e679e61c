"""Follows the merged model of a running job from outside, without a vote or a seat in it."""

from mend.following.follower import Version, follow

__all__ = ["Version", "follow"]
