// Makes a torch that was built without CUDA believe in one device of it, so that it takes the branches of a GPU.
// Loaded before torch is imported. The kernels are in Python: simulated.py and cuda_ops.py.
#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/RNN.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using at::Tensor;
using at::TensorList;
static const c10::Device kDevice(c10::DeviceType::CUDA, 0);

namespace at {
struct SimulatedHooks final : CUDAHooksInterface {
  SimulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", SimulatedHooks)
}  // namespace at

struct SimulatedGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
static c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new SimulatedGuard);

// Which attention torch takes: its own choice between 0 (plain ops), 1 (flash), 2 (efficient) and 3 (cuDNN).
static int64_t attention = 0;
extern "C" void choose_attention(int64_t chosen) { attention = chosen; }

static int64_t chosen_attention(const Tensor& query, const Tensor&, const Tensor&, const std::optional<Tensor>& mask, double,
                                bool, std::optional<double>, bool) {
  if (query.scalar_type() == at::kDouble || query.dim() != 4) return 0;
  return attention == 1 && mask.has_value() ? 2 : attention;  // flash takes no mask
}

// Recurrent layers by mode of cuDNN: 0 relu, 1 tanh, 2 LSTM, 3 GRU; `lengths` of steps where sequences are packed.
static void run_rnn(int64_t mode, Tensor& out, Tensor& hy, Tensor& cy, const Tensor& x, const Tensor& hx, const Tensor& cx,
                    TensorList weights, bool biases, int64_t layers, double p, bool train, bool both, bool batch_first,
                    at::IntArrayRef lengths = {}) {
  std::tie(out, hy, cy, std::ignore, std::ignore) = at::_cudnn_rnn(
      x, weights, biases ? 4 : 2, {}, hx, cx, mode, hx.size(2), 0, layers, batch_first, p, train, both, lengths, {});
}
static std::vector<int64_t> numbers(const Tensor& lengths) {
  return {lengths.data_ptr<int64_t>(), lengths.data_ptr<int64_t>() + lengths.numel()};
}
template <int mode>
static void rnn(Tensor& out, Tensor& hy, const Tensor& x, const Tensor& hx, TensorList weights, bool biases, int64_t layers,
                double p, bool train, bool both, bool batch_first) {
  Tensor cy;
  run_rnn(mode, out, hy, cy, x, hx, {}, weights, biases, layers, p, train, both, batch_first);
}
template <int mode>
static void packed_rnn(Tensor& out, Tensor& hy, const Tensor& x, const Tensor& lengths, const Tensor& hx, TensorList weights,
                       bool biases, int64_t layers, double p, bool train, bool both) {
  Tensor cy;
  run_rnn(mode, out, hy, cy, x, hx, {}, weights, biases, layers, p, train, both, false, numbers(lengths));
}
static void lstm(Tensor& out, Tensor& hy, Tensor& cy, const Tensor& x, TensorList state, TensorList weights, bool biases,
                 int64_t layers, double p, bool train, bool both, bool batch_first) {
  run_rnn(2, out, hy, cy, x, state[0], state[1], weights, biases, layers, p, train, both, batch_first);
}
static void packed_lstm(Tensor& out, Tensor& hy, Tensor& cy, const Tensor& x, const Tensor& lengths, TensorList state,
                        TensorList weights, bool biases, int64_t layers, double p, bool train, bool both) {
  run_rnn(2, out, hy, cy, x, state[0], state[1], weights, biases, layers, p, train, both, false, numbers(lengths));
}

static bool registered = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&chosen_attention);
  at::native::rnn_relu_cudnn_stub.set_cuda_dispatch_ptr(&rnn<0>);
  at::native::rnn_tanh_cudnn_stub.set_cuda_dispatch_ptr(&rnn<1>);
  at::native::gru_cudnn_stub.set_cuda_dispatch_ptr(&rnn<3>);
  at::native::lstm_cudnn_stub.set_cuda_dispatch_ptr(&lstm);
  at::native::rnn_relu_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed_rnn<0>);
  at::native::rnn_tanh_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed_rnn<1>);
  at::native::gru_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed_rnn<3>);
  at::native::lstm_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed_lstm);
  return true;
}();
