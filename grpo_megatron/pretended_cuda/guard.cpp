// What torch asks of a CUDA device from C++, answered without one: a device guard and CUDA hooks that
// do nothing. With them autograd's device threads, streams and events work for tensors that say
// `cuda:N` and have their data elsewhere.
//
// Streams are those of a device with one queue. They carry their device's index, by which autograd
// looks up threads and streams.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace {

c10::DeviceIndex num_devices = 1;
thread_local c10::DeviceIndex current_device = 0;

c10::Device device_of(c10::DeviceIndex index) {
  return c10::Device(c10::DeviceType::CUDA, index);
}

c10::Stream only_stream(c10::Device device) {
  const auto index = device.has_index() ? device.index() : current_device;
  return c10::Stream(c10::Stream::DEFAULT, device_of(index));
}

c10::DeviceIndex exchange(c10::DeviceIndex index) {
  const auto before = current_device;
  if (index >= 0) {
    current_device = index;
  }
  return before;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }
  c10::Device getDevice() const override { return device_of(current_device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return device_of(exchange(device.index()));
  }
  void setDevice(c10::Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange(device.index()); }

  c10::Stream getStream(c10::Device device) const override { return only_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return only_stream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return only_stream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return only_stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return only_stream(stream.device());
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new int(0);
    }
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<int*>(event);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  // False keeps autograd from asking the driver which device it should be on.
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  int getNumGPUs() const override { return num_devices; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return exchange(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchange(index);
  }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  // Attention asks for cuDNN's before it chooses a kernel, and chooses none for version 0.
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  long versionCuDNNFrontend() const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

Guard guard;

// torch keeps the hooks that it asks for first, and has asked by the time its import is over. So
// the object itself is replaced, where it lies. Hooks have no members: it is one pointer, to their
// functions.
void replace_hooks() {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  const at::CUDAHooksInterface& asked = at::detail::getCUDAHooks();
  new (const_cast<at::CUDAHooksInterface*>(&asked)) Hooks();
}

}  // namespace

// Called by install.py. Returns whether torch sees the devices now.
extern "C" int pretend_devices(int count) {
  num_devices = static_cast<c10::DeviceIndex>(count);
  // The last one to register is the one that counts; guards are never deleted.
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
  replace_hooks();
  return at::detail::getCUDAHooks().deviceCount() == num_devices;
}

extern "C" void set_device(int index) {
  exchange(static_cast<c10::DeviceIndex>(index));
}
