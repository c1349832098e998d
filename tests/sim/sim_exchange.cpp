#include "sim_exchange.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "sim_faults.h"

namespace torchft_ext::sim {
namespace {

constexpr uint64_t kMagic = 0x314c434e4d495354;  // "TSIMNCL1"
constexpr size_t kRingBytes = 64 << 10;

struct IdBytes {
  uint64_t magic;
  uint64_t nonce;
  int32_t pid;
  int32_t descriptor;
};

// One writer, one reader; positions only grow.
struct Ring {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) char bytes[kRingBytes];

  size_t put(const char* data, size_t count) {
    const uint64_t at = written.load(std::memory_order_relaxed);
    const size_t room = kRingBytes - (at - read.load(std::memory_order_acquire));
    const size_t here = std::min({count, room, kRingBytes - at % kRingBytes});
    std::memcpy(bytes + at % kRingBytes, data, here);
    written.store(at + here, std::memory_order_release);
    return here;
  }
  size_t get(char* data, size_t count) {
    const uint64_t at = read.load(std::memory_order_relaxed);
    const size_t there = written.load(std::memory_order_acquire) - at;
    const size_t here = std::min({count, there, kRingBytes - at % kRingBytes});
    std::memcpy(data, bytes + at % kRingBytes, here);
    read.store(at + here, std::memory_order_release);
    return here;
  }
};

}  // namespace

struct Exchange::Region {  // fresh shared memory is all zero: that is its first state
  uint64_t magic;
  uint64_t nonce;
  std::atomic<int> size;
  std::atomic<uint32_t> joined;  // one bit a rank
  std::atomic<bool> dismissed;
  std::atomic<bool> broken;             // ranks disagreed about their number: the root has ended
  Ring rings[2][kMaxRanks][kMaxRanks];  // channel, from, to
  // By sender and receiver: the collective after the last one that this end was stopped in.
  std::atomic<uint32_t> sends_junk[kMaxRanks][kMaxRanks];
  std::atomic<uint32_t> drops[kMaxRanks][kMaxRanks];

  bool over() const { return broken || complete(); }
  bool complete() const {
    const int ranks = size.load();
    return dismissed || (ranks > 0 && joined.load() == (1U << static_cast<unsigned>(ranks)) - 1);
  }
};

// The descriptors that this process keeps open for ranks still to come.
class Exchange::Roots {
 public:
  static Roots& instance() {
    static auto* const roots = new Roots;
    return *roots;
  }
  void add(uint64_t nonce, UniqueFd descriptor, std::shared_ptr<Exchange> exchange) {
    MutexLock lock(mutex_);
    roots_[nonce] = {std::move(descriptor), std::move(exchange)};
  }
  int sweep() {
    MutexLock lock(mutex_);
    std::erase_if(roots_, [](const auto& entry) { return entry.second.exchange->region_->over(); });
    return static_cast<int>(roots_.size());
  }

 private:
  struct Root {
    UniqueFd descriptor;
    std::shared_ptr<Exchange> exchange;
  };
  Mutex mutex_;
  std::map<uint64_t, Root> roots_ GUARDED_BY(mutex_);  // by nonce
};

namespace {

uint64_t freshNonce() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

}  // namespace

std::shared_ptr<Exchange> Exchange::create(NcclUniqueId* id) {
  UniqueFd descriptor(memfd_create("torchft_ext_sim", MFD_CLOEXEC));
  if (descriptor.get() < 0) return nullptr;
  if (ftruncate(descriptor.get(), sizeof(Region)) != 0) return nullptr;
  std::shared_ptr<Exchange> exchange = map(descriptor.get());
  if (!exchange) return nullptr;
  const IdBytes bytes{kMagic, freshNonce(), getpid(), descriptor.get()};
  exchange->region_->magic = kMagic;
  exchange->region_->nonce = bytes.nonce;
  std::memcpy(id->bytes.data(), &bytes, sizeof bytes);
  Roots::instance().add(bytes.nonce, std::move(descriptor), exchange);
  return exchange;
}

std::shared_ptr<Exchange> Exchange::open(const NcclUniqueId& id) {
  IdBytes bytes{};
  std::memcpy(&bytes, id.bytes.data(), sizeof bytes);
  if (bytes.magic != kMagic) return nullptr;
  const std::string path =
      "/proc/" + std::to_string(bytes.pid) + "/fd/" + std::to_string(bytes.descriptor);
  const UniqueFd descriptor(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (descriptor.get() < 0 || fstat(descriptor.get(), &status) != 0) return nullptr;
  if (!S_ISREG(status.st_mode) || status.st_size != sizeof(Region)) return nullptr;
  std::shared_ptr<Exchange> exchange = map(descriptor.get());
  if (!exchange || exchange->region_->nonce != bytes.nonce) return nullptr;
  return exchange;
}

std::shared_ptr<Exchange> Exchange::map(int descriptor) {
  void* memory = mmap(nullptr, sizeof(Region), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) return nullptr;
  return std::shared_ptr<Exchange>(new Exchange(static_cast<Region*>(memory)));
}

Exchange::~Exchange() {
  munmap(region_, sizeof(Region));
}

int Exchange::liveRoots() {
  return Roots::instance().sweep();
}

Exchange::Joined Exchange::join(int rank, int size) {
  int before = 0;
  if (!region_->size.compare_exchange_strong(before, size) && before != size) {
    region_->broken = true;
    return Joined::kDisagrees;
  }
  const uint32_t bit = 1U << static_cast<unsigned>(rank);
  return (region_->joined.fetch_or(bit) & bit) == 0 ? Joined::kYes : Joined::kTwice;
}

bool Exchange::complete() const {
  const bool complete = region_->complete();
  if (complete) Roots::instance().sweep();
  return complete;
}

void Exchange::dismiss() {
  region_->dismissed = true;
}

void Exchange::giveUp() {
  region_->broken = true;
}

bool Exchange::transfer(int rank, std::vector<Transfer>& transfers, const std::atomic<bool>& stop) {
  int idle_rounds = 0;
  while (!stop) {
    bool moved = false;
    bool all_done = true;
    bool waiting[2][2][kMaxRanks] = {};  // an earlier one to this peer goes first
    for (Transfer& one : transfers) {
      if (one.done == sizeof(MessageHeader) + one.header.bytes && !one.mismatched) continue;
      all_done = false;
      bool& before = waiting[one.sending][static_cast<size_t>(one.channel)][one.peer];
      if (!before && !one.mismatched) moved |= advance(rank, one);
      before = true;
    }
    if (all_done) return true;
    idle_rounds = moved ? 0 : idle_rounds + 1;
    if (idle_rounds > 200) {
      std::this_thread::sleep_for(std::chrono::microseconds(idle_rounds > 2000 ? 1000 : 100));
    } else if (idle_rounds > 0) {
      std::this_thread::yield();
    }
  }
  runThrough(rank, transfers);
  return false;
}

void Exchange::runThrough(int rank, const std::vector<Transfer>& stopped) {
  for (const Transfer& one : stopped) {
    if (one.channel != Transfer::Channel::kCollective) continue;
    auto& until =
        one.sending ? region_->sends_junk[rank][one.peer] : region_->drops[one.peer][rank];
    until.store(one.header.sequence + 1, std::memory_order_release);
  }
}

namespace {

bool isRunThrough(const Transfer& transfer, const std::atomic<uint32_t>& until) {
  return transfer.channel == Transfer::Channel::kCollective &&
         transfer.header.sequence < until.load(std::memory_order_acquire);
}

bool endWithJunk(Transfer& transfer) {
  constexpr int kJunk = 0x55;
  const size_t at = std::max(transfer.done, sizeof(MessageHeader)) - sizeof(MessageHeader);
  std::memset(transfer.data + at, kJunk, transfer.header.bytes - at);
  transfer.done = sizeof(MessageHeader) + transfer.header.bytes;
  return true;
}

}  // namespace

bool Exchange::advance(int rank, Transfer& transfer) {
  return transfer.sending ? advanceSend(rank, transfer) : advanceReceive(rank, transfer);
}

bool Exchange::advanceSend(int rank, Transfer& transfer) {
  Ring& ring = region_->rings[static_cast<size_t>(transfer.channel)][rank][transfer.peer];
  constexpr size_t kHeader = sizeof(MessageHeader);
  const size_t before = transfer.done;
  if (transfer.done < kHeader) {
    const char* header = reinterpret_cast<const char*>(&transfer.header);
    transfer.done += ring.put(header + transfer.done, kHeader - transfer.done);
  }
  if (transfer.done >= kHeader) {
    const size_t at = transfer.done - kHeader;
    transfer.done += ring.put(transfer.data + at, transfer.header.bytes - at);
  }
  if (transfer.done == before && isRunThrough(transfer, region_->drops[rank][transfer.peer]))
    transfer.done = kHeader + transfer.header.bytes;
  return transfer.done > before;
}

bool Exchange::advanceReceive(int rank, Transfer& transfer) {
  Ring& ring = region_->rings[static_cast<size_t>(transfer.channel)][transfer.peer][rank];
  constexpr size_t kHeader = sizeof(MessageHeader);
  static_assert(kRingBytes % kHeader == 0);
  const size_t before = transfer.done;
  if (transfer.done == 0) {
    const bool junk = isRunThrough(transfer, region_->sends_junk[transfer.peer][rank]);
    const uint64_t there =
        ring.written.load(std::memory_order_acquire) - ring.read.load(std::memory_order_relaxed);
    if (there < kHeader) return junk && endWithJunk(transfer);
    MessageHeader found;
    for (size_t got = 0; got < kHeader;)
      got += ring.get(reinterpret_cast<char*>(&found) + got, kHeader - got);
    transfer.done = kHeader;
    if (std::memcmp(&found, &transfer.header, kHeader) != 0) {
      transfer.mismatched = true;
      violation("ranks are out of step: expected " + std::to_string(transfer.header.bytes) +
                " bytes from rank " + std::to_string(transfer.peer) + ", found " +
                std::to_string(found.bytes) + ", or another operation");
      return true;
    }
  }
  const bool junk =
      isRunThrough(transfer, region_->sends_junk[transfer.peer][rank]);  // and no more
  const size_t at = transfer.done - kHeader;
  transfer.done += ring.get(transfer.data + at, transfer.header.bytes - at);
  return transfer.done > before || (junk && endWithJunk(transfer));
}

}  // namespace torchft_ext::sim
