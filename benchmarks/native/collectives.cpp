#include "collectives.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace torchft_ext::bench {
namespace {

constexpr DataType kFloat = DataType::kFloat32;
constexpr size_t kIssued = 64;

float item(int rank, size_t i) {
  return static_cast<float>(rank) + static_cast<float>(i % 7);
}

}  // namespace

const std::vector<std::string>& collectiveOps() {
  static const auto& all = *new std::vector<std::string>{
      "allreduce", "broadcast", "allgather", "reduce_scatter", "reduce",
      "gather",    "scatter",   "alltoall",  "sendrecv",       "barrier"};
  return all;
}

void Collectives::Pending::wait() const {
  first.wait();
  second.wait();
}

Row Collectives::measure(const std::string& op, size_t bytes) {
  prepare(op, bytes);
  for (int i = 0; i < 3; ++i) begin(op).wait();
  const size_t rounds = agreeOnRounds(op);
  Row row = rowOf(op, bytes);
  std::vector<double> issue;
  issue.reserve(rounds);
  row.times.reserve(rounds);
  for (size_t i = 0; i < rounds; ++i) {
    const auto began = BenchClock::now();
    const Pending pending = begin(op);
    const auto issued = BenchClock::now();
    pending.wait();
    row.times.push_back(microseconds(BenchClock::now() - began));
    issue.push_back(microseconds(issued - began));
  }
  row.issue_us = median(std::move(issue));
  takeSlowest(row.times);
  row.wrong = countWrong(op);
  return row;
}

Row Collectives::issueWithoutWait() {
  prepare("allreduce", kIssued * sizeof(float));
  Row row = rowOf("issue", 0);
  std::vector<double> issue;
  std::array<Request, kIssued> requests;
  for (int i = 0; i < 10 * member_.arguments.rounds; ++i) {
    const auto began = BenchClock::now();
    for (size_t k = 0; k < kIssued; ++k) {
      requests[k] = member_.comm.allreduce(&out_[k], 1, kFloat, Reduction::kSum);
    }
    issue.push_back(microseconds(BenchClock::now() - began) / kIssued);
    for (const Request& request : requests) request.wait();
    row.times.push_back(microseconds(BenchClock::now() - began) / kIssued);
  }
  row.issue_us = median(std::move(issue));
  return row;
}

Row Collectives::waitForDone() {
  constexpr int kWaits = 1000;
  Row row = rowOf("wait_done", 0);
  const Request request = member_.comm.barrier();
  request.wait();
  for (int i = 0; i < 10 * member_.arguments.rounds; ++i) {
    const auto began = BenchClock::now();
    for (int k = 0; k < kWaits; ++k) request.wait();
    row.times.push_back(microseconds(BenchClock::now() - began) / kWaits);
  }
  return row;
}

// Sums in place are of zeros, which stay zeros however often they are summed.
void Collectives::prepare(const std::string& op, size_t bytes) {
  const auto parts = hasParts(op) ? static_cast<size_t>(member_.size) : 1;
  count_ = std::max<size_t>(bytes / sizeof(float) / parts, 1);
  in_.resize(count_ * parts);
  out_.assign(count_ * parts, 0);
  for (size_t i = 0; i < in_.size(); ++i) in_[i] = item(member_.rank, i % count_);
}

Collectives::Pending Collectives::begin(const std::string& op) {
  Comm& comm = member_.comm;
  const int rank = member_.rank;
  float* const in = in_.data();
  float* const out = out_.data();
  if (op == "allreduce") return {comm.allreduce(out, count_, kFloat, Reduction::kSum), {}};
  if (op == "broadcast") return {comm.broadcast(rank == 0 ? in : out, count_, kFloat, 0), {}};
  if (op == "allgather") return {comm.allgather(in, out, count_, kFloat), {}};
  if (op == "reduce_scatter") {
    return {comm.reduceScatter(in, out, count_, kFloat, Reduction::kSum), {}};
  }
  if (op == "reduce") return {comm.reduce(in, out, count_, kFloat, Reduction::kSum, 0), {}};
  if (op == "gather") return {comm.gather(in, out, count_, kFloat, 0), {}};
  if (op == "scatter") return {comm.scatter(in, out, count_, kFloat, 0), {}};
  if (op == "alltoall") return {comm.alltoall(in, out, count_, kFloat), {}};
  if (op == "barrier") return {comm.barrier(), {}};
  if (op == "sendrecv") {
    const int next = (rank + 1) % member_.size;
    const int before = (rank + member_.size - 1) % member_.size;
    Request sent = comm.send(in, count_, kFloat, next);
    return {std::move(sent), comm.recv(out, count_, kFloat, before)};
  }
  throw std::invalid_argument("--op: " + op + " is none of them");
}

// As many as fit in the time, the same on all ranks.
size_t Collectives::agreeOnRounds(const std::string& op) {
  const auto began = BenchClock::now();
  for (int i = 0; i < 3; ++i) begin(op).wait();
  const double each = std::max(microseconds(BenchClock::now() - began) / 3, 1.0);
  auto rounds =
      static_cast<int64_t>(std::clamp(member_.arguments.seconds * 1e6 / each, 5.0, 5000.0));
  member_.comm.broadcast(&rounds, 1, DataType::kInt64, 0).wait();
  return static_cast<size_t>(rounds);
}

// A root may be done long before the others: what counts is the slowest rank, round by round.
void Collectives::takeSlowest(std::vector<double>& times) {
  member_.comm.allreduce(times.data(), times.size(), DataType::kFloat64, Reduction::kMax).wait();
}

// Of one more round, on all ranks.
size_t Collectives::countWrong(const std::string& op) {
  std::fill(out_.begin(), out_.end(), -1.0F);
  if (op == "allreduce") std::copy(in_.begin(), in_.end(), out_.begin());
  begin(op).wait();
  int64_t wrong = 0;
  for (size_t i = 0; i < out_.size(); ++i) {
    const float wanted = expected(op, i);
    if (wanted >= 0 && out_[i] != wanted) ++wrong;
  }
  member_.comm.allreduce(&wrong, 1, DataType::kInt64, Reduction::kSum).wait();
  return static_cast<size_t>(wrong);
}

// What item i of the result has to be; negative: there is none here.
float Collectives::expected(const std::string& op, size_t i) const {
  const size_t within = i % count_;
  const auto part = static_cast<int>(i / count_);
  const int size = member_.size;
  const int rank = member_.rank;
  const float ranks = static_cast<float>(size * (size - 1)) / 2;
  const float sum = ranks + static_cast<float>(size) * static_cast<float>(within % 7);
  if (op == "allreduce") return sum;
  if (op == "broadcast") return rank == 0 ? -1 : item(0, within);
  if (op == "allgather" || op == "alltoall") return item(part, within);
  if (op == "gather") return rank == 0 ? item(part, within) : -1;
  if (op == "reduce_scatter") return part == 0 ? sum : -1;
  if (op == "reduce") return rank == 0 ? sum : -1;
  if (op == "scatter") return part == 0 ? item(0, within) : -1;
  if (op == "sendrecv") return item((rank + size - 1) % size, within);
  return -1;
}

Row Collectives::rowOf(const std::string& op, size_t bytes) {
  const auto parts = hasParts(op) ? static_cast<size_t>(member_.size) : 1;
  Row row;
  row.op = op;
  row.bytes = bytes == 0 ? 0 : count_ * sizeof(float) * parts;
  row.count = bytes == 0 ? 0 : count_;
  row.bus_factor = busFactor(op, member_.size);
  return row;
}

}  // namespace torchft_ext::bench
