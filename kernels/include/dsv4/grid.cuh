// Overlap of a kernel's launch with the end of the one before it (compute capability 9.0; nothing before).
#pragma once

namespace dsv4 {

// Waits until the kernels before this one have finished and their writes are visible. A kernel launched with
// `overlap` calls it in every thread block before it reads or writes anything, but for what `load_ahead` is for: later
// kernels rely on it to be ordered behind all earlier ones.
__device__ __forceinline__ void grid_dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel be launched once every thread block of this one has got here (or left).
__device__ __forceinline__ void grid_dependency_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A number that a kernel before may be about to write, on which nothing may depend but what is brought to L2. Past L1: what
// is read there later must not be this.
template <typename T>
__device__ __forceinline__ T load_ahead(const T* at) {
  return __ldcg(at);
}

// Asks for a cache line that this or another thread block is about to load.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace dsv4
