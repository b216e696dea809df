// Host side of every operation: device guard, current stream, launch and its error.
//
// The Python faces have validated dtypes, shapes and strides before a call arrives here (sglang_dsv4/ops/checks.py);
// what is checked again is what a launch itself can get wrong.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <cstdint>

namespace dsv4 {

using tvm::ffi::TensorView;

inline void cuda_check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(status);
  }
}

// Makes a tensor's device current for one call and puts the caller's back.
class DeviceGuard {
 public:
  explicit DeviceGuard(const TensorView& tensor) : device_(tensor.device().device_id) {
    cuda_check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device_) cuda_check(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (previous_ != device_) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_;
  int previous_ = 0;
};

// torch's current stream: tvm-ffi records it when a torch tensor crosses the call.
inline cudaStream_t current_stream(const TensorView& tensor) {
  const DLDevice device = tensor.device();
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t dynamic_smem = 0;
  unsigned cluster = 1;  // thread block cluster along x; needs compute capability 9.0
  // The kernel may start while the one before it ends; it must call grid_dependency_wait() (grid.cuh) first of all.
  bool overlap = false;
};

// What a launch on `stream` is configured by; `attributes` must live as long.
inline cudaLaunchConfig_t launch_config(const LaunchShape& shape, cudaStream_t stream,
                                        cudaLaunchAttribute (&attributes)[2]) {
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.dynamic_smem;
  config.stream = stream;
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = shape.cluster;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }
  if (shape.overlap && DSV4_ARCH >= 90) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return config;
}

template <typename... Params>
void allow_shared(const LaunchShape& shape, void (*kernel)(Params...)) {
  if (shape.dynamic_smem > 48 * 1024) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shape.dynamic_smem)),
               "cudaFuncSetAttribute");
  }
}

// Launches on torch's current stream. An empty grid is no launch: a step may hold no tokens.
template <typename... Params, typename... Args>
void launch(const TensorView& anchor, const LaunchShape& shape, void (*kernel)(Params...), Args&&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  allow_shared(shape, kernel);
  cudaLaunchAttribute attributes[2] = {};
  const cudaLaunchConfig_t config = launch_config(shape, current_stream(anchor), attributes);
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "kernel launch");
}

// How many clusters of this shape run at once on the current device.
template <typename... Params>
int clusters_at_once(LaunchShape shape, void (*kernel)(Params...)) {
  allow_shared(shape, kernel);
  shape.overlap = false;
  cudaLaunchAttribute attributes[2] = {};
  const cudaLaunchConfig_t config = launch_config(shape, nullptr, attributes);
  int count = 0;
  cuda_check(cudaOccupancyMaxActiveClusters(&count, kernel, &config), "cudaOccupancyMaxActiveClusters");
  return count;
}

// Multiprocessors of the current device; asked once per device.
inline int multiprocessors() {
  static int counts[64] = {};
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  int& count = counts[device & 63];
  if (count == 0) {
    cuda_check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  }
  return count;
}

template <typename T>
T* data_of(const TensorView& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

inline bool is_bf16(const TensorView& tensor) { return tensor.dtype().code == kDLBfloat; }

}  // namespace dsv4
