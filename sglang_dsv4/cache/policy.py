"""Where snapshots are taken. Positions only; no pools, no tree, no SGLang."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dsv4.geometry import WINDOW


@dataclass(frozen=True)
class SnapshotPolicy:
    """Snapshots of a prefill, at page boundaries only.

    page_size  tokens; every compressor tail is empty at its multiples
    """

    page_size: int

    def positions(
        self, *, prefix_len: int, extend_end: int, prompt_len: int, branch: int | None
    ) -> list[int]:
        """Ascending positions in (prefix_len, extend_end] whose state this extend step must keep.

        branch  where cached text goes on differently, if the tree reported it: the next request that shares it
                resumes there
        The last one is the end of the step. A prompt of whole pages also keeps the page before: a match is capped
        one token short of the prompt, so its exact repeat can resume only there.
        """
        page = self.page_size
        wanted = {extend_end // page * page}
        if extend_end == prompt_len:
            wanted.add((prompt_len - 1) // page * page)
        if branch is not None:
            wanted.add(branch // page * page)
        return sorted(p for p in wanted if prefix_len + WINDOW <= p <= extend_end)
