"""Operations on pages, slots and tails: one module each, holding the torch reference and the CUDA face.

Callers use the names here; `dispatch` decides which implementation serves which device.
"""
