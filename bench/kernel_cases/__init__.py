"""Performance cases of the kernels: each module here offers `cases(select) -> Iterator[Case]`."""
