#include "sim_ipc.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "base/unique_fd.h"
#include "sim_device.h"
#include "sim_faults.h"
#include "sim_segments.h"

namespace torchft_ext::sim {
namespace {

struct Handle {
  pid_t pid = 0;
  int descriptor = -1;
  uint64_t file = 0;
  uint64_t bytes = 0;
};

std::string textOf(const Handle& handle) {
  return {reinterpret_cast<const char*>(&handle), sizeof handle};
}

// A file of another process, mapped while this lives.
class Mapping {
 public:
  explicit Mapping(const std::string& text) {
    Handle handle;
    TORCH_CHECK(text.size() == sizeof handle, "no handle of the simulator's");
    std::memcpy(&handle, text.data(), sizeof handle);
    const std::string path =
        "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.descriptor);
    const UniqueFd file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
    struct stat found {};
    TORCH_CHECK(file.get() >= 0 && ::fstat(file.get(), &found) == 0 && S_ISREG(found.st_mode) &&
                    found.st_ino == handle.file,
                "what the handle stands for is gone");
    bytes_ = handle.bytes;
    memory_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    TORCH_CHECK(memory_ != MAP_FAILED, "out of address space");
  }
  ~Mapping() { ::munmap(memory_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  void* memory() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

// What an event is, in memory that processes share.
struct Marks {
  std::atomic<uint32_t> recorded{0};
  std::atomic<uint32_t> passed{0};

  static int futex(std::atomic<uint32_t>& word, int what, uint32_t value) {
    return static_cast<int>(
        ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), what, value, nullptr, nullptr, 0));
  }
  void pass(uint32_t which) {
    if (static_cast<int32_t>(which - passed) > 0) passed = which;
    futex(passed, FUTEX_WAKE, INT32_MAX);
  }
  void await(uint32_t which) {
    for (uint32_t now = passed; static_cast<int32_t>(which - now) > 0; now = passed)
      futex(passed, FUTEX_WAIT, now);
  }
};

class SimIpcEvent final : public IpcEvent {
 public:
  // In this process, or another one.
  SimIpcEvent(UniqueFd file, const std::string& handle)
      : file_(std::move(file)), handle_(handle), mapping_(std::make_shared<Mapping>(handle)) {
    Faults::instance().count("live_ipc_events");
  }
  ~SimIpcEvent() override { Faults::instance().count("live_ipc_events", -1); }

  std::string handle() const override { return handle_; }
  void record(const c10::Stream& stream) override {
    Faults::instance().pause("record", -1);
    const uint32_t which = ++marks().recorded;
    streamOf(stream).enqueue([mapping = mapping_, which] { marksOf(*mapping).pass(which); });
  }
  void block(const c10::Stream& stream) override {
    const uint32_t which = marks().recorded;
    streamOf(stream).enqueue([mapping = mapping_, which] { marksOf(*mapping).await(which); });
  }

 private:
  static Marks& marksOf(const Mapping& mapping) { return *static_cast<Marks*>(mapping.memory()); }
  Marks& marks() const { return marksOf(*mapping_); }

  const UniqueFd file_;  // of one that this process has made: others open it
  const std::string handle_;
  const std::shared_ptr<Mapping> mapping_;  // kept by tasks
};

class SimIpc final : public DeviceIpc {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }

  bool capturing(const c10::Stream& stream) const override {
    return streamOf(stream).capture() != nullptr;
  }

  IpcMemory memoryAt(const void* inside, c10::DeviceIndex /*device*/) const override {
    Faults::instance().pause("lend", -1);
    const auto place = Segments::instance().around(inside);
    TORCH_CHECK_VALUE(place.has_value(), "this memory cannot be lent");
    const Handle handle{::getpid(), place->descriptor, place->file, place->bytes};
    return {place->base, place->bytes, textOf(handle)};
  }

  std::shared_ptr<void> openMemory(const IpcMemory& memory,
                                   c10::DeviceIndex device) const override {
    auto mapping = std::make_shared<Mapping>(memory.handle);
    TORCH_CHECK(mapping->bytes() == memory.bytes, "a handle of another size");
    addForeignMemory(mapping->memory(), mapping->bytes(), device);
    return {mapping->memory(), [mapping](void* opened) { removeForeignMemory(opened); }};
  }

  std::shared_ptr<IpcEvent> makeEvent(c10::DeviceIndex /*device*/) const override {
    Faults::instance().pause("lend_event", -1);
    UniqueFd file(::memfd_create("torchft_ext_sim-event", MFD_CLOEXEC));
    struct stat found {};
    TORCH_CHECK(file.get() >= 0 && ::ftruncate(file.get(), sizeof(Marks)) == 0 &&
                    ::fstat(file.get(), &found) == 0,
                "no descriptor for an event");
    const Handle handle{::getpid(), file.get(), found.st_ino, sizeof(Marks)};
    return std::make_shared<SimIpcEvent>(std::move(file), textOf(handle));
  }
  std::shared_ptr<IpcEvent> openEvent(const std::string& handle,
                                      c10::DeviceIndex /*device*/) const override {
    return std::make_shared<SimIpcEvent>(UniqueFd(), handle);
  }
};

}  // namespace

std::shared_ptr<DeviceIpc> makeSimIpc() {
  return std::make_shared<SimIpc>();
}

}  // namespace torchft_ext::sim
