// What shared memory allows on this machine: the collectives of ft_bench between processes that
// copy and add through memory they share, and do nothing else. No failures are noticed, nothing has
// a deadline, nothing can be aborted, and whoever waits burns its core. A limit to compare with.
//
//   shm_limit --world 4 --op all --max 64M      the arguments, the table and the JSON of ft_bench
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iostream>
#include <new>
#include <stdexcept>
#include <thread>

#include "arguments.h"
#include "report.h"

namespace torchft_ext::bench {
namespace {

constexpr size_t kMostRanks = 64;
constexpr size_t kMostRounds = 5000;
constexpr size_t kChunk = size_t{256} << 10;  // bytes of one rank's data that are shared at a time
constexpr size_t kRing = 4;                   // chunks that a rank may be ahead
constexpr size_t kSmall = size_t{32} << 10;   // up to here each rank adds up everything itself
constexpr size_t kBlock = 1024;               // items added up at a time, which stay in the cache

// How far one rank is, in steps: a step is one chunk of every rank's, the same on all ranks.
struct alignas(128) Progress {
  std::atomic<uint64_t> shared{0};  // its chunks that others may read
  std::atomic<uint64_t> summed{0};  // its chunks in which its own part is the sum
  std::atomic<uint64_t> done{0};    // steps in which it reads no more
};

struct Shared {
  Progress ranks[kMostRanks];
  std::atomic<int64_t> rounds{0};
  std::atomic<size_t> wrong{0};
  double times[kMostRanks][kMostRounds];
};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void* share(size_t bytes) {
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

// The part [begin, end) of so many items that belongs to a rank, in whole cache lines.
struct Part {
  size_t begin = 0;
  size_t end = 0;
  Part(size_t items, int rank, int size) {
    const size_t each = items / static_cast<size_t>(size) / 16 * 16;
    begin = each * static_cast<size_t>(rank);
    end = rank == size - 1 ? items : begin + each;
  }
};

// out[i] = the sum of all inputs[r][i], in the order of the ranks. out may be one of the inputs.
void addUp(float* out, const std::vector<const float*>& inputs, size_t items) {
  float sums[kBlock];
  for (size_t begin = 0; begin < items; begin += kBlock) {
    const size_t count = std::min(kBlock, items - begin);
    std::memcpy(sums, inputs[0] + begin, count * sizeof(float));
    for (size_t r = 1; r < inputs.size(); ++r) {
      const float* const more = inputs[r] + begin;
      for (size_t i = 0; i < count; ++i) sums[i] += more[i];
    }
    std::memcpy(out + begin, sums, count * sizeof(float));
  }
}

// One rank's operations. Every rank calls the same ones in the same order.
class SharedMemory {
 public:
  SharedMemory(Shared& shared, char* staging, int rank, int size)
      : shared_(shared),
        staging_(staging),
        rank_(rank),
        size_(size),
        pauses_(static_cast<unsigned>(size) <= std::thread::hardware_concurrency() ? 200 : 5) {}

  void barrier() {
    put([](float*) {});
    awaitShared(others_);
    finish();
  }

  // In place.
  void allreduce(float* data, size_t items) {
    if (items * sizeof(float) <= kSmall) return allreduceSmall(data, items);
    inChunks(
        items, kChunk / sizeof(float),
        [&](float* chunk, size_t begin, size_t count) {
          const Part own(count, rank_, size_);  // from where it is: the others do not read it
          std::copy_n(data + begin, own.begin, chunk);
          std::copy(data + begin + own.end, data + begin + count, chunk + own.end);
        },
        [&](size_t begin, size_t count) { sumAndSpread(data + begin, count); });
  }

  void broadcast(float* data, size_t items) {
    inChunks(
        items, kChunk / sizeof(float),
        [&](float* chunk, size_t begin, size_t count) {
          if (rank_ == 0) std::copy_n(data + begin, count, chunk);
        },
        [&](size_t begin, size_t count) {
          if (rank_ == 0) return;
          awaitShared({0});
          std::copy_n(chunkOf(0), count, data + begin);
        });
  }

  // all[r * items + i]: item i of rank r. Only who wants it reads it.
  void gather(const float* in, float* all, size_t items, bool wanted) {
    inChunks(
        items, kChunk / sizeof(float),
        [&](float* chunk, size_t begin, size_t count) { std::copy_n(in + begin, count, chunk); },
        [&](size_t begin, size_t count) {
          if (!wanted) return;
          for (const int from : others_) {
            awaitShared({from});
            std::copy_n(chunkOf(from), count, all + static_cast<size_t>(from) * items + begin);
          }
          std::copy_n(in + begin, count, all + static_cast<size_t>(rank_) * items + begin);
        });
  }

  void alltoall(const float* all, float* out, size_t items) {
    exchangeParts(all, items, true, [&](size_t begin, size_t count, size_t most) {
      for (const int from : others_) {
        std::copy_n(awaitPart(from, most), count, out + static_cast<size_t>(from) * items + begin);
      }
      const size_t own = static_cast<size_t>(rank_) * items + begin;
      std::copy_n(all + own, count, out + own);
    });
  }

  void scatter(const float* all, float* out, size_t items) {
    exchangeParts(all, items, rank_ == 0, [&](size_t begin, size_t count, size_t most) {
      std::copy_n(rank_ == 0 ? all + begin : awaitPart(0, most), count, out + begin);
    });
  }

  void reduceScatter(const float* all, float* out, size_t items) {
    exchangeParts(all, items, true, [&](size_t begin, size_t count, size_t most) {
      std::vector<const float*> inputs{all + static_cast<size_t>(rank_) * items + begin};
      for (const int from : others_) inputs.push_back(awaitPart(from, most));
      addUp(out + begin, inputs, count);
    });
  }

  void reduce(const float* in, float* out, size_t items) {
    inChunks(
        items, kChunk / sizeof(float),
        [&](float* chunk, size_t begin, size_t count) {
          if (rank_ != 0) std::copy_n(in + begin, count, chunk);
        },
        [&](size_t begin, size_t count) {
          if (rank_ != 0) return;
          awaitShared(others_);
          std::vector<const float*> inputs{in + begin};
          for (const int from : others_) inputs.push_back(chunkOf(from));
          addUp(out + begin, inputs, count);
        });
  }

  // To the next rank, from the one before.
  void sendrecv(const float* in, float* out, size_t items) {
    const int before = (rank_ + size_ - 1) % size_;
    inChunks(
        items, kChunk / sizeof(float),
        [&](float* chunk, size_t begin, size_t count) { std::copy_n(in + begin, count, chunk); },
        [&](size_t begin, size_t count) {
          awaitShared({before});
          std::copy_n(chunkOf(before), count, out + begin);
        });
  }

 private:
  using Put = std::function<void(float* chunk, size_t begin, size_t count)>;
  using Read = std::function<void(size_t begin, size_t count)>;

  // Chunk by chunk: one is put before the one before it is read.
  void inChunks(size_t items, size_t most, const Put& write, const Read& read) {
    const auto countAt = [&](size_t begin) { return std::min(most, items - begin); };
    put([&](float* chunk) { write(chunk, 0, countAt(0)); });
    for (size_t begin = 0; begin < items; begin += most) {
      const size_t next = begin + most;
      if (next < items) put([&](float* chunk) { write(chunk, next, countAt(next)); });
      read(begin, countAt(begin));
      finish();
    }
  }

  // Of `items` for each rank, so many at a time that those for all ranks fit in a chunk.
  using ReadParts = std::function<void(size_t begin, size_t count, size_t most)>;
  void exchangeParts(const float* all, size_t items, bool puts, const ReadParts& read) {
    const size_t most = kChunk / sizeof(float) / static_cast<size_t>(size_);
    inChunks(
        items, most,
        [&](float* chunk, size_t begin, size_t count) {
          for (const int to : others_) {
            const auto place = static_cast<size_t>(to);
            if (puts) std::copy_n(all + place * items + begin, count, chunk + place * most);
          }
        },
        [&](size_t begin, size_t count) { read(begin, count, most); });
  }

  // What `from` has put for this rank.
  const float* awaitPart(int from, size_t most) const {
    awaitShared({from});
    return chunkOf(from) + static_cast<size_t>(rank_) * most;
  }

  void allreduceSmall(float* data, size_t items) {
    put([&](float* chunk) { std::copy_n(data, items, chunk); });
    awaitShared(others_);
    std::vector<const float*> inputs;
    inputs.reserve(all_.size());
    for (const int rank : all_) inputs.push_back(chunkOf(rank));
    addUp(data, inputs, items);
    finish();
  }

  // This rank's part of the step: the sum goes to data, and to its own chunk for the others.
  void sumAndSpread(float* data, size_t items) {
    const Part own(items, rank_, size_);
    awaitShared(others_);
    std::vector<const float*> inputs;
    inputs.reserve(all_.size());
    for (const int rank : all_) {
      inputs.push_back((rank == rank_ ? data : chunkOf(rank)) + own.begin);
    }
    addUp(data + own.begin, inputs, own.end - own.begin);
    std::copy(data + own.begin, data + own.end, chunkOf(rank_) + own.begin);
    mine().summed.store(step_ + 1, std::memory_order_release);
    for (const int from : others_) {
      const Part part(items, from, size_);
      await(progressOf(from).summed, step_ + 1);
      std::copy(chunkOf(from) + part.begin, chunkOf(from) + part.end, data + part.begin);
    }
  }

  void put(const std::function<void(float*)>& write) {
    if (put_ >= kRing) {
      for (const int rank : others_) await(progressOf(rank).done, put_ + 1 - kRing);
    }
    write(chunkOf(rank_, put_));
    mine().shared.store(++put_, std::memory_order_release);
  }

  void finish() { mine().done.store(++step_, std::memory_order_release); }

  void awaitShared(const std::vector<int>& ranks) const {
    for (const int rank : ranks) await(progressOf(rank).shared, step_ + 1);
  }

  void await(const std::atomic<uint64_t>& value, uint64_t least) const {
    for (int i = 0; value.load(std::memory_order_acquire) < least; ++i) {
      if (i < pauses_) {
        pause();
      } else {
        ::sched_yield();
      }
    }
  }

  Progress& progressOf(int rank) const { return shared_.ranks[rank]; }
  Progress& mine() const { return shared_.ranks[rank_]; }
  float* chunkOf(int rank) const { return chunkOf(rank, step_); }
  float* chunkOf(int rank, uint64_t step) const {
    const size_t place = static_cast<size_t>(rank) * kRing + step % kRing;
    return reinterpret_cast<float*>(staging_ + place * kChunk);
  }

  std::vector<int> ranksFrom(int first) const {  // from this one on, so that not all read the same
    std::vector<int> ranks;
    for (int i = first; i < size_; ++i) ranks.push_back((rank_ + i) % size_);
    return ranks;
  }

  Shared& shared_;
  char* const staging_;
  const int rank_;
  const int size_;
  const int pauses_;   // before a waiter lets others run
  uint64_t put_ = 0;   // steps for which its chunk was put
  uint64_t step_ = 0;  // steps that are over
  const std::vector<int> all_ = ranksFrom(0);
  const std::vector<int> others_ = ranksFrom(1);
};

const std::vector<std::string>& allOps() {
  static const auto& all = *new std::vector<std::string>{
      "allreduce", "broadcast", "allgather", "reduce_scatter", "reduce",
      "gather",    "scatter",   "alltoall",  "sendrecv",       "barrier"};
  return all;
}

float item(int rank, size_t i) {
  return static_cast<float>(rank) + static_cast<float>(i % 7);
}

// One rank's measures, as ft_bench's.
class Measures {
 public:
  Measures(Shared& shared, SharedMemory& memory, int rank, int size)
      : shared_(shared), memory_(memory), rank_(rank), size_(size) {}

  Row measure(const std::string& op, size_t bytes, double seconds) {
    const auto parts = hasParts(op) ? static_cast<size_t>(size_) : 1;
    count_ = std::max<size_t>(bytes / sizeof(float) / parts, 1);
    in_.resize(count_ * parts);
    for (size_t i = 0; i < in_.size(); ++i) in_[i] = item(rank_, i % count_);
    out_.assign(count_ * parts, 0);  // sums in place are of zeros, which stay zeros
    for (int i = 0; i < 3; ++i) once(op);
    Row row;
    row.op = op;
    row.bytes = bytes == 0 ? 0 : count_ * sizeof(float) * parts;
    row.count = bytes == 0 ? 0 : count_;
    row.bus_factor = busFactor(op, size_);
    for (int64_t left = agreeOnRounds(op, seconds); left > 0; --left) {
      const auto began = BenchClock::now();
      once(op);
      row.times.push_back(microseconds(BenchClock::now() - began));
    }
    takeSlowest(row.times);
    row.wrong = countWrong(op);
    return row;
  }

 private:
  void once(const std::string& op) {
    float* const in = in_.data();
    float* const out = out_.data();
    if (op == "allreduce") memory_.allreduce(out, count_);
    if (op == "broadcast") memory_.broadcast(rank_ == 0 ? in : out, count_);
    if (op == "allgather") memory_.gather(in, out, count_, true);
    if (op == "gather") memory_.gather(in, out, count_, rank_ == 0);
    if (op == "reduce_scatter") memory_.reduceScatter(in, out, count_);
    if (op == "reduce") memory_.reduce(in, out, count_);
    if (op == "scatter") memory_.scatter(in, out, count_);
    if (op == "alltoall") memory_.alltoall(in, out, count_);
    if (op == "sendrecv") memory_.sendrecv(in, out, count_);
    if (op == "barrier") memory_.barrier();
  }

  int64_t agreeOnRounds(const std::string& op, double seconds) {
    const auto began = BenchClock::now();
    for (int i = 0; i < 3; ++i) once(op);
    const double each = std::max(microseconds(BenchClock::now() - began) / 3, 0.2);
    if (rank_ == 0)
      shared_.rounds = static_cast<int64_t>(
          std::clamp(seconds * 1e6 / each, 5.0, static_cast<double>(kMostRounds)));
    memory_.barrier();
    const int64_t rounds = shared_.rounds;
    memory_.barrier();
    return rounds;
  }

  // Of all ranks, round by round.
  void takeSlowest(std::vector<double>& times) {
    std::copy(times.begin(), times.end(), shared_.times[rank_]);
    memory_.barrier();
    for (int rank = 0; rank < size_; ++rank) {
      for (size_t i = 0; i < times.size(); ++i)
        times[i] = std::max(times[i], shared_.times[rank][i]);
    }
    memory_.barrier();
  }

  // Of one more round, on all ranks.
  size_t countWrong(const std::string& op) {
    std::fill(out_.begin(), out_.end(), -1.0F);
    if (op == "allreduce") std::copy(in_.begin(), in_.end(), out_.begin());
    once(op);
    size_t wrong = 0;
    for (size_t i = 0; i < out_.size(); ++i) {
      const float wanted = expected(op, i % count_, static_cast<int>(i / count_));
      if (wanted >= 0 && out_[i] != wanted) ++wrong;
    }
    shared_.wrong += wrong;
    memory_.barrier();
    wrong = shared_.wrong;
    memory_.barrier();
    if (rank_ == 0) shared_.wrong = 0;
    memory_.barrier();
    return wrong;
  }

  // What an item of the result has to be; negative: there is none here.
  float expected(const std::string& op, size_t i, int part) const {
    const float ranks = static_cast<float>(size_ * (size_ - 1)) / 2;
    const float sum = ranks + static_cast<float>(size_) * static_cast<float>(i % 7);
    if (op == "allreduce" || (op == "reduce" && rank_ == 0)) return sum;
    if (op == "reduce_scatter" && part == 0) return sum;
    if (op == "broadcast" && rank_ != 0) return item(0, i);
    if (op == "scatter" && part == 0) return item(0, i);
    if (op == "allgather" || op == "alltoall" || (op == "gather" && rank_ == 0))
      return item(part, i);
    if (op == "sendrecv") return item((rank_ + size_ - 1) % size_, i);
    return -1;
  }

  Shared& shared_;
  SharedMemory& memory_;
  const int rank_;
  const int size_;
  size_t count_ = 0;  // items of one part
  std::vector<float> in_;
  std::vector<float> out_;
};

bool runRank(const Arguments& arguments, Shared& shared, char* staging, int rank) {
  SharedMemory memory(shared, staging, rank, arguments.world);
  Measures measures(shared, memory, rank, arguments.world);
  std::vector<Row> rows;
  if (rank == 0) printHead();
  for (const std::string& op : chosenOps(arguments.op, allOps())) {
    const auto sizes = op == "barrier" ? std::vector<size_t>{0} : sizesOf(arguments);
    for (const size_t bytes : sizes) {
      rows.push_back(measures.measure(op, bytes, arguments.seconds));
      if (rank == 0) print(rows.back());
    }
  }
  if (rank == 0) printJson("shm_limit", arguments.world, rows);
  return allRight(rows);
}

int run(const Arguments& arguments) {
  const int world = arguments.world;
  if (world < 2 || world > static_cast<int>(kMostRanks)) {
    throw std::invalid_argument("--world: expected 2 to " + std::to_string(kMostRanks));
  }
  chosenOps(arguments.op, allOps());
  auto& shared = *new (share(sizeof(Shared))) Shared;
  auto* const staging = static_cast<char*>(share(kChunk * kRing * static_cast<size_t>(world)));
  for (int rank = 1; rank < world; ++rank) {
    if (::fork() == 0) ::_exit(runRank(arguments, shared, staging, rank) ? 0 : 1);
  }
  bool good = runRank(arguments, shared, staging, 0);
  for (int status = 0; ::wait(&status) > 0;) good = good && status == 0;
  return good ? 0 : 1;
}

}  // namespace
}  // namespace torchft_ext::bench

int main(int argc, char** argv) {
  try {
    return torchft_ext::bench::run(torchft_ext::bench::parseArguments({argv + 1, argv + argc}));
  } catch (const std::exception& error) {
    std::cerr << "shm_limit: " << error.what() << "\n";
    return 2;
  }
}
