"""The decided versions of a job that a follower has read. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from mend.errors import WireError
from mend.status.follow_messages import Followed, RackLanes


@dataclass(frozen=True, slots=True)
class Decided:
    """The merged model after one commit: version and digests (per rank) of every fragment."""

    versions: tuple[int, ...]
    digests: tuple[tuple[str, ...], ...]
    step: int

    @property
    def digest(self) -> str:
        """Identifies these bits: equal versions of another lineage have another digest."""
        text = " ".join(
            f"{v}:{','.join(d)}" for v, d in zip(self.versions, self.digests, strict=True)
        )
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class LogView:
    """`now` is None before the job has begun."""

    lineage: str = ""
    index: int = 0
    now: Decided | None = None
    over: bool = False
    racks: tuple[RackLanes, ...] = ()

    def accepts(self, answer: Followed, *, alone: bool) -> bool:
        """Whether to accept an answer. That of a process which does not know this lineage is
        accepted only if no other process has answered for long (`alone`): the process may be cut
        off and follow an older lineage, or the job was started again, in a new one."""
        if not answer.lineage:
            return False
        if self.lineage in ("", answer.lineage):
            return answer.index >= self.index
        return answer.knows or alone

    def take(self, answer: Followed) -> list[Decided]:
        """The versions since the last answer, oldest first. Raises WireError for an answer that
        does not continue from there."""
        if answer.versions:
            if len(answer.versions) != len(answer.digests):
                raise WireError("versions without digests in an answer to a follower")
            found = [Decided(answer.versions, answer.digests, answer.step)]
        elif answer.lineage != self.lineage or self.now is None:
            raise WireError("commits of another lineage in an answer to a follower")
        else:
            found = self._after(self.now, answer)
        self.lineage, self.index = answer.lineage, answer.index
        self.over = answer.over
        self.racks = answer.racks or self.racks  # a job that is over has none
        same = self.now is not None and found[:1] == [self.now]
        self.now = found[-1] if found else self.now
        return [] if same else found

    @staticmethod
    def _after(now: Decided, answer: Followed) -> list[Decided]:
        found = []
        for commit in answer.commits:
            fragment, versions, digests = commit.fragment, list(now.versions), list(now.digests)
            if fragment < len(versions) and commit.version <= versions[fragment]:
                continue  # the answer to a question that was asked twice
            if fragment >= len(versions) or commit.version != versions[fragment] + 1:
                raise WireError(f"version {commit.version} of fragment {fragment} out of order")
            versions[fragment], digests[fragment] = commit.version, commit.digests
            now = Decided(tuple(versions), tuple(digests), max(now.step, commit.step))
            found.append(now)
        return found
