"""Performance cases of the kernels: each module here offers `cases(device) -> Iterator[Case]`."""
