#include "sim_device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <new>
#include <string>

#include "base/mutex.h"
#include "sim_faults.h"
#include "sim_registrations.h"
#include "sim_segments.h"

namespace torchft_ext::sim {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int64_t kPoolStreams = 8;  // of each priority; ids from 1, high priority above
constexpr uint8_t kFreedByte = 0xDD;

std::atomic<bool> memory_is_shared{false};  // by shareMemory()
thread_local int current_device = 0;
thread_local std::array<int64_t, kMaxDevices> current_stream{};  // ids

// ---- the end

std::atomic<bool> unloaded{false};  // by exit()

// Of a runtime that exit() has unloaded every call fails. Out of what is noexcept: terminate().
void checkLoaded(const char* call) {
  if (!unloaded) return;
  std::fprintf(stderr, "%s: the simulated device has ended\n", call);
  TORCH_CHECK(false, call, ": the simulated device has ended");
}

// ---- streams

class Streams {
 public:
  static Streams& instance() {
    static auto* const streams = new Streams;  // threads outlive static destructors
    return *streams;
  }
  SimStream& at(int device, int64_t id) {
    TORCH_CHECK(device >= 0 && device < deviceCount(), "no simulated device ", device);
    TORCH_CHECK(id >= 0 && id <= 2 * kPoolStreams, "no stream ", id);
    return *streams_[static_cast<size_t>(device)][static_cast<size_t>(id)];
  }
  SimStream& fromPool(int device, bool high) {
    const int64_t turn = next_++ % kPoolStreams;
    return at(device, 1 + turn + (high ? kPoolStreams : 0));
  }

 private:
  Streams() {
    // As a real runtime: when it is first used, which is after torch's tables were made.
    std::atexit([] { unloaded = true; });
    for (int device = 0; device < kMaxDevices; ++device) {
      for (int64_t id = 0; id <= 2 * kPoolStreams; ++id)
        streams_[static_cast<size_t>(device)].push_back(std::make_unique<SimStream>(device, id));
    }
  }
  std::array<std::vector<std::unique_ptr<SimStream>>, kMaxDevices> streams_;  // constant
  std::atomic<int64_t> next_{0};  // by whoever wants a stream
};

// ---- memory

enum class Home { kHeap, kSegment, kOtherProcess };

struct Block {
  size_t bytes = 0;
  Home home = Home::kHeap;
  int device = 0;
  int64_t stream = 0;            // of the allocation
  std::vector<int64_t> also_on;  // record_stream
  int pins = 0;
  int retires = 0;  // marks in streams that have still to pass; -1: in use
};

class Memory {
 public:
  static Memory& instance() {
    static auto* const memory = new Memory;
    return *memory;
  }

  void* allocate(size_t bytes) {
    checkLoaded("allocate");
    if (bytes == 0) return nullptr;
    Block block;
    block.bytes = bytes;
    block.home = memory_is_shared ? Home::kSegment : Home::kHeap;
    void* data = nullptr;
    const bool taken = block.home == Home::kSegment
                           ? (data = Segments::instance().take(bytes, current_device)) != nullptr
                           : posix_memalign(&data, 512, bytes) == 0;
    TORCH_CHECK(taken, "out of simulated memory: ", bytes);
    block.device = current_device;
    block.stream = currentStream().id;
    block.retires = -1;
    MutexLock lock(mutex_);
    blocks_.emplace(key(data), std::move(block));
    return data;
  }

  // The allocation's last user is gone: it is freed once its streams have come this far.
  void retire(void* data) {
    std::vector<SimStream*> streams;
    {
      MutexLock lock(mutex_);
      const auto found = blocks_.find(key(data));
      if (found == blocks_.end()) return;
      Block& block = found->second;
      streams.push_back(&Streams::instance().at(block.device, block.stream));
      for (int64_t id : block.also_on) streams.push_back(&Streams::instance().at(block.device, id));
      block.retires = static_cast<int>(streams.size());
    }
    for (SimStream* stream : streams) {
      auto passed = [this, data] { retirePassed(data); };
      if (const auto graph = stream->capture()) {
        graph->atEnd(passed);  // a graph's memory is its own until it goes
      } else if (stream->idle()) {
        passed();
      } else {
        stream->enqueueRetire(passed);
      }
    }
  }

  void addForeign(void* data, size_t bytes, int device) {
    Block block;
    block.bytes = bytes;
    block.home = Home::kOtherProcess;
    block.device = device;
    block.retires = -1;
    MutexLock lock(mutex_);
    blocks_.emplace(key(data), std::move(block));
  }
  void removeForeign(void* data) {
    MutexLock lock(mutex_);
    if (blocks_.at(key(data)).pins > 0)
      violation("memory of another process was closed while a task used it");
    blocks_.erase(key(data));
  }

  void alsoOn(const void* data, int64_t stream) {
    MutexLock lock(mutex_);
    const auto found = blocks_.find(key(data));
    if (found != blocks_.end()) found->second.also_on.push_back(stream);
  }

  uintptr_t pin(const void* data, size_t bytes, const char* user) {
    MutexLock lock(mutex_);
    auto after = blocks_.upper_bound(key(data));
    if (after != blocks_.begin()) {
      auto& [start, block] = *std::prev(after);
      if (block.retires != 0 && key(data) + bytes <= start + block.bytes) {
        ++block.pins;
        return start;
      }
    }
    violation(std::string(user) + " used memory that is not the device's, or was freed");
    return 0;
  }

  void unpin(uintptr_t start) {
    MutexLock lock(mutex_);
    Block& block = blocks_.at(start);
    if (--block.pins == 0 && block.retires == 0) release(start);
  }

  bool contains(const void* inside) const {
    MutexLock lock(mutex_);
    const auto after = blocks_.upper_bound(key(inside));
    if (after == blocks_.begin()) return false;
    const auto& [start, block] = *std::prev(after);
    return key(inside) < start + block.bytes;
  }

  size_t live() const {
    MutexLock lock(mutex_);
    return blocks_.size();
  }

 private:
  static uintptr_t key(const void* data) { return reinterpret_cast<uintptr_t>(data); }

  void retirePassed(void* data) {
    MutexLock lock(mutex_);
    Block& block = blocks_.at(key(data));
    if (--block.retires > 0) return;
    if (block.pins > 0) {
      violation("memory was freed while a task on another stream used it");
    } else {
      release(key(data));
    }
  }

  // Under the lock to its end: nobody may pin what is about to go.
  void release(uintptr_t start) REQUIRES(mutex_) {
    const auto [bytes, home] = std::pair(blocks_.at(start).bytes, blocks_.at(start).home);
    if (Registrations::covers(start, bytes))
      violation("memory was freed that is registered in a live communicator");
    blocks_.erase(start);
    void* data = reinterpret_cast<void*>(start);
    std::memset(data, kFreedByte, bytes);
    home == Home::kSegment ? Segments::instance().give(start) : std::free(data);
  }

  mutable Mutex mutex_;
  std::map<uintptr_t, Block> blocks_ GUARDED_BY(mutex_);  // by address
};

void retireMemory(void* data) {
  checkLoaded("free");
  Memory::instance().retire(data);
}

struct SimAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = Memory::instance().allocate(bytes);
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(current_device));
    return {data, data, &retireMemory, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &retireMemory; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    currentStream().synchronize();
    std::memcpy(to, from, bytes);
  }
};

// ---- guard

using EventHandle = std::shared_ptr<SimEvent>;
EventHandle& eventOf(void* event) {
  return *static_cast<EventHandle*>(event);
}

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return device(current_device); }
  void setDevice(c10::Device to) const override { setCurrentDevice(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    checkLoaded("uncheckedSetDevice");
    current_device = to.index();
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(sim::deviceCount());
  }
  c10::Stream getStream(c10::Device on) const override {
    return sim::currentStream(on.index()).handle();
  }
  c10::Stream getDefaultStream(c10::Device on) const override {
    return Streams::instance().at(on.index(), 0).handle();
  }
  c10::Stream getStreamFromGlobalPool(c10::Device on, bool high) const override {
    const int index = on.has_index() ? on.index() : current_device;
    return Streams::instance().fromPool(index, high).handle();
  }
  c10::Stream getNewStream(c10::Device on, int priority) const override {
    return getStreamFromGlobalPool(on, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_stream[static_cast<size_t>(stream.device_index())] = stream.id();
    return before;
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex index,
              c10::EventFlag flag) const override {
    checkLoaded("record");
    TORCH_CHECK(index == -1 || index == stream.device_index(), "event and stream differ in device");
    if (*event == nullptr) {
      const bool timed = flag == c10::EventFlag::BACKEND_DEFAULT;
      *event = new EventHandle(std::make_shared<SimEvent>(stream.device_index(), timed));
    }
    countOnCurrentDevice("recorded");
    streamOf(stream).record(eventOf(*event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    checkLoaded("block");
    countOnCurrentDevice("blocked");
    if (event != nullptr) streamOf(stream).block(eventOf(event));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    checkLoaded("queryEvent");
    checkUsable(event, "an event was queried");
    countOnCurrentDevice("queried");
    return eventOf(event)->done();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    checkUsable(event, "an event was synchronised");
    eventOf(event)->await(eventOf(event)->scheduled());
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event != nullptr) checkLoaded("destroyEvent");
    delete static_cast<EventHandle*>(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    TORCH_CHECK(eventOf(from)->done() && eventOf(to)->done(), "an event has not happened yet");
    return elapsedMs(*eventOf(from), *eventOf(to));
  }

  bool queryStream(const c10::Stream& stream) const override {
    checkQueryAllowed("a stream was queried");
    return streamOf(stream).idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    streamOf(stream).synchronize();
  }
  void synchronizeDevice(c10::DeviceIndex index) const override { sim::synchronizeDevice(index); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Faults::instance().count("record_stream");
    Memory::instance().alsoOn(data.get(), stream.id());
  }

 private:
  static c10::Device device(int index) {
    return c10::Device(kType, static_cast<c10::DeviceIndex>(index));
  }
  static void checkUsable(void* event, const char* what) {
    checkQueryAllowed(what);
    if (!eventOf(event)->captured().graph.expired())
      violation(std::string(what) + " that was recorded in a capture");
  }
};

// Host memory that torch asks to be pinned: any, by whose name it is known again.
class PinnedAllocator final : public c10::Allocator {
 public:
  static PinnedAllocator& instance() {
    static auto* const one = new PinnedAllocator;  // tensors may outlive static objects
    return *one;
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = std::malloc(std::max<size_t>(bytes, 1));
    if (data == nullptr) throw std::bad_alloc();
    MutexLock lock(mutex_);
    ends_[static_cast<char*>(data)] = static_cast<char*>(data) + bytes;
    return {data, data, &freePinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &freePinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool holds(const void* data) const {
    const char* const byte = static_cast<const char*>(data);
    MutexLock lock(mutex_);
    const auto after = ends_.upper_bound(byte);
    return after != ends_.begin() && byte < std::prev(after)->second;
  }

 private:
  static void freePinned(void* data) {
    {
      MutexLock lock(instance().mutex_);
      instance().ends_.erase(static_cast<char*>(data));
    }
    std::free(data);
  }
  mutable Mutex mutex_;
  std::map<const char*, const char*> ends_ GUARDED_BY(mutex_);  // by beginning
};

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(sim::deviceCount());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { sim::setCurrentDevice(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = getCurrentDevice();
    sim::setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::instance(); }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::instance().holds(data);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    // In stream order, as on a real device: the caller may hold Python's lock.
    const int before = current_device;
    sim::setCurrentDevice(storage.device().index());
    c10::DataPtr fresh = storage.allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) {
      currentStream().enqueue([to = fresh.get(), from = storage.data(), kept] {
        const Pin source(from, kept, "a resize");
        const Pin target(to, kept, "a resize");
        if (source.ok() && target.ok()) std::memcpy(to, from, kept);
      });
    }
    sim::setCurrentDevice(before);
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

struct Registration {
  Registration() {
    c10::SetAllocator(kType, new SimAllocator);  // storages may outlive static destructors
    at::RegisterPrivateUse1HooksInterface(new SimHooks);
    c10::register_privateuse1_backend("privateuseone");  // or at::getAccelerator() finds none
  }
};
const Registration registration;

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard)

int deviceCount() {
  static const int count = [] {
    const char* text = std::getenv("TORCHFT_EXT_SIM_DEVICES");
    return text == nullptr ? 4 : std::clamp(std::atoi(text), 1, kMaxDevices);
  }();
  return count;
}

int currentDevice() {
  return current_device;
}

void countOnCurrentDevice(const char* name) {
  Faults::instance().count(std::string(name) + " on " + std::to_string(current_device));
}

void setCurrentDevice(int device) {
  checkLoaded("setDevice");
  TORCH_CHECK(device >= 0 && device < deviceCount(), "no simulated device ", device);
  current_device = device;
}

SimStream& streamOf(const c10::Stream& stream) {
  return Streams::instance().at(stream.device_index(), stream.id());
}

SimStream& currentStream(int device) {
  const int index = device < 0 ? current_device : device;
  return Streams::instance().at(index, current_stream[static_cast<size_t>(index)]);
}

SimStream& currentStream() {
  return currentStream(current_device);
}

void synchronizeDevice(int device) {
  const int index = device < 0 ? current_device : device;
  for (int64_t id = 0; id <= 2 * kPoolStreams; ++id)
    Streams::instance().at(index, id).synchronize();
}

Pin::Pin(const void* data, size_t bytes, const char* user)
    : block_(bytes == 0 ? 0 : Memory::instance().pin(data, bytes, user)),
      ok_(bytes == 0 || block_ != 0) {}

Pin::~Pin() {
  if (block_ != 0) Memory::instance().unpin(block_);
}

size_t liveAllocations() {
  return Memory::instance().live();
}

void shareMemory(bool share) {
  memory_is_shared = share;
}

void addForeignMemory(void* data, size_t bytes, int device) {
  Memory::instance().addForeign(data, bytes, device);
}

void removeForeignMemory(void* data) {
  Memory::instance().removeForeign(data);
}

bool isDeviceMemory(const void* inside) {
  return Memory::instance().contains(inside);
}

void Gate::open() {
  MutexLock lock(mutex_);
  open_ = true;
  opened_.notifyAll();
}

void Gate::await() {
  MutexLock lock(mutex_);
  while (!open_) opened_.waitUntil(mutex_, Deadline::never());
}

std::shared_ptr<Gate> stall(const c10::Stream& stream) {
  auto gate = std::make_shared<Gate>();
  streamOf(stream).enqueue([gate] { gate->await(); });
  return gate;
}

}  // namespace torchft_ext::sim
