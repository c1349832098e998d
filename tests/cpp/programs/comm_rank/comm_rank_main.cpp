// A rank of a world of plain-memory groups: every operation, checked by number; then the death of
// the last rank, and a world without it. No torch in this process.
//   usage: torchft_ext_comm_rank DIRECTORY RANK SIZE
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <future>
#include <iostream>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "torchft_ext/comm.h"

namespace torchft_ext {
namespace {

using Floats = std::vector<float>;

void expect(bool good, const std::string& what) {
  if (!good) throw std::runtime_error("wrong: " + what);
}

// Item i of rank r is 100 * r + i.
Floats valuesOf(int rank, size_t count) {
  Floats values(count);
  for (size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>(100 * rank) + static_cast<float>(i);
  return values;
}

Floats sumOf(int size, size_t count) {
  Floats sum(count, 0);
  for (int rank = 0; rank < size; ++rank) {
    const Floats values = valuesOf(rank, count);
    for (size_t i = 0; i < count; ++i) sum[i] += values[i];
  }
  return sum;
}

Floats allOf(int size, size_t count) {
  Floats all;
  for (int rank = 0; rank < size; ++rank) {
    const Floats values = valuesOf(rank, count);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

constexpr size_t kCount = 37;
constexpr DataType kFloat = DataType::kFloat32;

void reductions(Comm& comm) {
  const int rank = comm.rank();
  const int size = comm.size();
  Floats data = valuesOf(rank, kCount);
  comm.allreduce(data.data(), kCount, kFloat, Reduction::kSum).wait();
  expect(data == sumOf(size, kCount), "allreduce");
  data = valuesOf(rank, kCount);
  Floats output(kCount);
  comm.reduce(data.data(), rank == 1 ? output.data() : nullptr, kCount, kFloat, Reduction::kMax, 1)
      .wait();
  if (rank == 1) expect(output == valuesOf(size - 1, kCount), "reduce");
  const Floats all = allOf(size, kCount);
  comm.reduceScatter(all.data(), output.data(), kCount, kFloat, Reduction::kSum).wait();
  Floats expected = valuesOf(rank, kCount);
  for (float& value : expected) value *= static_cast<float>(size);
  expect(output == expected, "reduceScatter");
  std::vector<int32_t> bits{1 << rank};
  comm.allreduce(bits.data(), 1, DataType::kInt32, Reduction::kBitOr).wait();
  expect(bits[0] == (1 << size) - 1, "allreduce of bits");
}

void movements(Comm& comm) {
  const int rank = comm.rank();
  const int size = comm.size();
  const size_t whole = kCount * static_cast<size_t>(size);
  const Floats own = valuesOf(rank, kCount);
  Floats data = own;
  comm.broadcast(data.data(), kCount, kFloat, 1).wait();
  expect(data == valuesOf(1, kCount), "broadcast");
  Floats all(whole);
  comm.allgather(own.data(), all.data(), kCount, kFloat).wait();
  expect(all == allOf(size, kCount), "allgather");
  all.assign(whole, 0);
  comm.gather(own.data(), rank == 0 ? all.data() : nullptr, kCount, kFloat, 0).wait();
  if (rank == 0) expect(all == allOf(size, kCount), "gather");
  const Floats parts = allOf(size, kCount);
  comm.scatter(rank == 0 ? parts.data() : nullptr, data.data(), kCount, kFloat, 0).wait();
  expect(data == own, "scatter");
  comm.alltoall(parts.data(), all.data(), kCount, kFloat).wait();
  for (int from = 0; from < size; ++from) {
    const auto begin = all.begin() + static_cast<ptrdiff_t>(kCount) * from;
    expect(Floats(begin, begin + kCount) == own, "alltoall");
  }
  comm.barrier().wait();
}

void messages(Comm& comm) {
  const int rank = comm.rank();
  const int size = comm.size();
  const Floats own = valuesOf(rank, kCount);
  Floats received(kCount);
  const Request sent = comm.send(own.data(), kCount, kFloat, (rank + 1) % size, 7);
  const Request came = comm.recv(received.data(), kCount, kFloat, -1, 7);
  sent.wait();
  came.wait();
  expect(came.done() && came.source() == (rank + size - 1) % size, "the source of a message");
  expect(received == valuesOf((rank + size - 1) % size, kCount), "a message");
}

void loseLast(Comm& comm, const std::shared_ptr<Store>& store) {
  const int rank = comm.rank();
  const int last = comm.size() - 1;
  auto told = std::make_shared<std::promise<int>>();  // called on another thread, maybe later
  comm.onFailure([told](const FailurePtr& failure) { told->set_value(failure->cause.rank); });
  Floats data = valuesOf(rank, kCount);
  try {
    comm.barrier().wait();  // all listen
    if (rank == last) ::kill(::getpid(), SIGKILL);
    for (;;) comm.allreduce(data.data(), kCount, kFloat, Reduction::kSum).wait();
  } catch (const PeerLostError& error) {
    expect(error.failure().cause.rank == last, error.what());
  }
  expect(comm.errored() != nullptr, "errored()");
  comm.configure(store, "world/1", rank, last);
  auto heard = told->get_future();
  expect(heard.wait_for(std::chrono::seconds(30)) == std::future_status::ready, "onFailure()");
  expect(heard.get() == last, "who onFailure() names");
  comm.onFailure({});
  reductions(comm);
  movements(comm);
}

void run(const std::string& directory, int rank, int size) {
  const auto store = makeFileStore(directory);
  CommOptions options;
  options.name = "world";
  options.timeout = std::chrono::seconds(60);
  Comm comm(options);
  comm.configure(store, "world/0", rank, size);
  reductions(comm);
  movements(comm);
  messages(comm);
  loseLast(comm, store);
  expect(comm.generation() == 2 && comm.stats().generations == 2, "the count of generations");
  expect(comm.shutdown(), "shutdown()");
}

}  // namespace
}  // namespace torchft_ext

int main(int argc, char** argv) {
  try {
    if (argc != 4) throw std::runtime_error("usage: DIRECTORY RANK SIZE");
    torchft_ext::run(argv[1], std::atoi(argv[2]), std::atoi(argv[3]));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
