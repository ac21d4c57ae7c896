// A device that is not the CPU: memory of its own kind, in which torch refuses to mix tensors with those of the CPU.
// Every kernel is that of the CPU, on copies. It finds tensors that were left behind, without a GPU.
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/alloc_cpu.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

namespace {

constexpr auto KIND = at::DeviceType::PrivateUse1;

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    return {data, data, &c10::free_cpu, at::Device(KIND, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
};
const bool registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

// One device with one stream, on which all work is done when a call returns.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<KIND> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor alias_on_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  alias_on_cpu(to).copy_(alias_on_cpu(from));
  return to;
}

// Outputs that a kernel of the CPU has sized; views are not resized, so that the storage holds the tensor alone.
const at::Tensor& resize_storage(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t bytes = impl->numel() * impl->itemsize();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    storage->set_data_ptr_noswap(memory.allocate(bytes));
    storage->set_nbytes(bytes);
  }
  return tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resize_storage(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar read_scalar(const at::Tensor& tensor) { return alias_on_cpu(tensor).item(); }

at::Tensor convolve(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  const auto own = bias && bias->defined() ? std::optional(alias_on_cpu(*bias)) : std::nullopt;
  return at::convolution(
             alias_on_cpu(input), alias_on_cpu(weight), own, stride, padding, dilation, transposed, output_padding,
             groups).to(KIND);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> differentiate_convolution(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  const int64_t channels = gradient.size(1);
  auto [a, b, c] = at::convolution_backward(
      alias_on_cpu(gradient), alias_on_cpu(input), alias_on_cpu(weight), c10::IntArrayRef(channels), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  const auto move = [](const at::Tensor& t) { return t.defined() ? t.to(KIND) : t; };
  return {move(a), move(b), move(c)};
}

void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_storage);
  m.impl("_local_scalar_dense", read_scalar);
  m.impl("convolution_overrideable", convolve);
  m.impl("convolution_backward_overrideable", differentiate_convolution);
  m.impl("as_strided", at::cpu::as_strided);
  m.impl("view", at::cpu::view);
  m.impl("unfold", at::cpu::unfold);
  m.impl("set_.source_Storage_storage_offset", [](at::Tensor& t, c10::Storage s, int64_t o, c10::IntArrayRef n, c10::IntArrayRef st) -> at::Tensor& { return at::cpu::set_(t, s, o, n, st); });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}
