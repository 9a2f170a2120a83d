// Lets torch without CUDA trace programs for it: a guard that moves between no devices, and word that there is one.
// Nothing runs. To be loaded before torch asks for either: see lowered_worker.py.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {

struct CUDAHooks : CUDAHooksInterface {  // torch looks for this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

const Device only_device(DeviceType::CUDA, 0);
const c10::Stream only_stream(c10::Stream::DEFAULT, only_device);

struct NoGuard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return only_device; }
  Device getDevice() const override { return only_device; }
  c10::Stream getStream(Device) const noexcept override { return only_stream; }
  c10::Stream getDefaultStream(Device) const override { return only_stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, NoGuard)

}  // namespace at
