#include "kernel.h"

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "base/mutex.h"
#include "functions.h"
#include "kernel_collectives.h"
#include "kernel_link.h"
#include "kernel_reduce.h"
#include "sim_faults.h"
#include "sim_types.h"

namespace torchft_ext::nccl_host {
namespace {

struct Library {
  explicit Library(const LibrarySymbols* symbols) : symbols(symbols), functions(*symbols) {}
  const LibrarySymbols* symbols;
  Functions functions;
};
const Library* library = nullptr;  // set once, before any launch

// A kernel that runs: what it was given, and the threads that work on it.
class Launched {
 public:
  explicit Launched(std::vector<char> arguments) : arguments_(std::move(arguments)) {}

  void run() {
    std::vector<std::thread> others;
    uint64_t channels = plan().channels;
    for (unsigned block = 0; channels != 0; ++block) {
      const int channel = __builtin_ctzll(channels);
      channels &= channels - 1;
      if (channels == 0) {
        inChannel(channel, block);
      } else {
        others.emplace_back([this, channel, block] { inChannel(channel, block); });
      }
    }
    for (std::thread& each : others) each.join();
  }

 private:
  const Plan& plan() const { return *reinterpret_cast<const Plan*>(arguments_.data()); }
  const Batch& batch(unsigned number) const {
    return reinterpret_cast<const Batch*>(arguments_.data() + sizeof(Plan))[number];
  }

  void inChannel(int channel, unsigned first) {
    try {
      for (std::optional<unsigned> at = first; at;) at = runBatch(channel, *at);
    } catch (const Aborted&) {
      // as NCCL's: it ends, and nobody counts on what it moved
    }
  }

  // The work of a batch and of those that extend it; then the number of the next.
  template <class Work>
  std::vector<Work> workOf(unsigned& number) const {
    std::vector<Work> all;
    for (;;) {
      const Batch& one = batch(number);
      for (uint64_t which = one.which; which != 0; which &= which - 1) {
        const uint64_t offset =
            one.offset + static_cast<uint64_t>(__builtin_ctzll(which)) * sizeof(Work);
        const char* at = plan().storage == 0 ? arguments_.data() + offset
                                             : plan().work + (offset & plan().work_mask);
        std::memcpy(static_cast<void*>(&all.emplace_back()), at, sizeof(Work));
      }
      if (one.next_extends == 0) return all;
      number += one.next_jump;
    }
  }

  std::optional<unsigned> runBatch(int channel, unsigned number) {
    const Batch first = batch(number);
    const std::optional<Function> function = library->functions.at(first.function);
    const auto kind = static_cast<WorkKind>(first.kind);
    const bool fits =
        function && (kind == WorkKind::kTransfer) == (function->what == Collection::kTransfers);
    if (!fits || kind == WorkKind::kRegisteredCollective) {
      sim::violation("NCCL launched a kernel that is not there: function " +
                     std::to_string(first.function));
      throw Aborted();
    }
    if (kind == WorkKind::kTransfer) {
      transfers(channel, workOf<Transfer>(number));
    } else {
      for (const Collective& work : workOf<Collective>(number))
        runCollective(*plan().comm, channel, *function, work);
    }
    const Batch& last = batch(number);
    if (last.next_jump == 0) return std::nullopt;
    return number + last.next_jump;
  }

  // All at once: each may wait for a peer that is in another.
  void transfers(int channel, const std::vector<Transfer>& all) {
    std::atomic<bool> aborted{false};
    std::vector<std::thread> threads;
    const auto start = [&](auto run, const Transfer& work) {
      threads.emplace_back([&, run] {
        try {
          run(*plan().comm, channel, work);
        } catch (const Aborted&) {
          aborted = true;
        }
      });
    };
    for (const Transfer& work : all) {
      if (work.send_channels > 0) start(runSend, work);
      if (work.recv_channels > 0) start(runRecv, work);
    }
    for (std::thread& each : threads) each.join();
    if (aborted) throw Aborted();
  }

  const std::vector<char> arguments_;
};

// What can be checked of a plan's layout (device_layout.h).
bool plausible(const std::vector<char>& arguments) {
  if (arguments.size() < sizeof(Plan) + sizeof(Batch)) return false;
  const auto& plan = *reinterpret_cast<const Plan*>(arguments.data());
  if (plan.comm == nullptr || plan.channels == 0 || plan.storage > 2) return false;
  const DeviceComm& comm = *plan.comm;
  if (comm.size < 1 || comm.rank < 0 || comm.rank >= comm.size || comm.abort_flag == nullptr)
    return false;
  if (comm.channels == nullptr || *comm.abort_flag > 1) return false;
  const int channel = __builtin_ctzll(plan.channels);
  const Ring& ring = comm.channels[channel].ring;
  return ring.ranks != nullptr && ring.ranks[0] == comm.rank;
}

}  // namespace

void setLibrary(const LibrarySymbols* symbols) {
  library = new Library(symbols);  // NCCL's threads outlive static destructors
}

bool launchPlan(const void*, std::vector<char> arguments, sim::SimStream& stream) {
  if (!plausible(arguments)) {
    sim::violation("NCCL launched a kernel whose arguments are not laid out as expected");
    return false;
  }
  auto launched = std::make_shared<Launched>(std::move(arguments));
  stream.enqueue([launched] { launched->run(); });
  return true;
}

namespace {

// By the C++ type in a kernel's mangled name: FuncPreMulSum<TYPE>.
std::optional<NcclType> typeOfOneRank(const std::string& name) {
  static const std::map<std::string, NcclType> types = {
      {"a", NcclType::kInt8},
      {"h", NcclType::kUint8},
      {"i", NcclType::kInt32},
      {"j", NcclType::kUint32},
      {"l", NcclType::kInt64},
      {"m", NcclType::kUint64},
      {"6__half", NcclType::kFloat16},
      {"f", NcclType::kFloat32},
      {"d", NcclType::kFloat64},
      {"13__nv_bfloat16", NcclType::kBFloat16},
      {"13__nv_fp8_e4m3", NcclType::kFloat8E4M3},
      {"13__nv_fp8_e5m2", NcclType::kFloat8E5M2},
  };
  const std::string before = "oneRankReduceI13FuncPreMulSumI";
  const size_t at = name.find(before);
  if (at == std::string::npos) return std::nullopt;
  const size_t first = at + before.size();
  const auto found = types.find(name.substr(first, name.find("EEE", first) - first));
  if (found == types.end()) return std::nullopt;
  return found->second;
}

}  // namespace

// oneRankReduce(void* output, void* input, size_t count, uint64_t argument, bool by_pointer): of a
// world of one, for reductions that change what is given.
bool launchOneRank(const void* function, void** arguments, sim::SimStream& stream) {
  const std::string name = library->symbols->nameAt(function);
  const std::optional<NcclType> type = typeOfOneRank(name);
  if (!type) {
    sim::violation("NCCL launched a kernel that is not there: " + name);
    return false;
  }
  auto* const output = *static_cast<void**>(arguments[0]);
  auto* const input = *static_cast<void**>(arguments[1]);
  const auto count = *static_cast<size_t*>(arguments[2]);
  const auto argument = *static_cast<uint64_t*>(arguments[3]);
  const auto by_pointer = *static_cast<bool*>(arguments[4]);
  stream.enqueue([=] {
    std::memmove(output, input, count * sim::sizeOf(*type));
    Reduction{DeviceOp::kPreMulSum, *type, by_pointer ? loadArgument(argument) : argument}.before(
        output, count);
  });
  return true;
}

}  // namespace torchft_ext::nccl_host
