#include "child/operation_of.h"

#include <algorithm>
#include <utility>

namespace torchft_ext::child {
namespace {

struct Counts {
  size_t outputs;
  size_t inputs;
};

// Of one rank's buffers.
Counts countsOf(OpKind op, bool is_root, size_t size) {
  switch (op) {
    case OpKind::kAllreduce:
    case OpKind::kBroadcast:
    case OpKind::kRecv:
      return {1, 0};
    case OpKind::kAllgather:
      return {size, 1};
    case OpKind::kReduceScatter:
      return {1, size};
    case OpKind::kReduce:
      return {is_root ? size_t{1} : 0, 1};
    case OpKind::kGather:
      return {is_root ? size : 0, 1};
    case OpKind::kScatter:
      return {1, is_root ? size : 0};
    case OpKind::kAlltoall:
      return {size, size};
    case OpKind::kSend:
      return {0, 1};
    default:
      return {0, 0};
  }
}

// What this rank gives itself must fit.
bool fitsItself(const Operation& operation, size_t rank) {
  const auto& in = operation.inputs;
  const auto& out = operation.outputs;
  if (in.empty() || out.empty()) return true;
  const size_t input = in.size() > rank && in.size() > 1 ? rank : 0;
  const size_t output = out.size() > rank && out.size() > 1 ? rank : 0;
  return in[input].bytes == out[output].bytes;
}

std::vector<Buffer> buffersOf(const std::vector<Span>& spans, const ServedEngine& memory) {
  std::vector<Buffer> buffers;
  for (const Span& span : spans) {
    const auto buffer = memory.at(span);
    if (!buffer) throw ProtocolError("a span outside the shared memory");
    buffers.push_back(*buffer);
  }
  return buffers;
}

std::string problemOf(const Issue& issue, const Operation& operation, int rank, int size) {
  const bool message = !isCollective(issue.op);
  const int least = issue.op == OpKind::kRecv ? -1 : 0;
  if (issue.peer < least || issue.peer >= size || (message && issue.peer == rank))
    return std::string(message ? "peer" : "root") + ": found " + std::to_string(issue.peer);
  const Counts wanted = countsOf(issue.op, issue.peer == rank, static_cast<size_t>(size));
  const Counts found{operation.outputs.size(), operation.inputs.size()};
  if (found.outputs != wanted.outputs || found.inputs != wanted.inputs) {
    return "expected " + std::to_string(wanted.outputs) + " outputs and " +
           std::to_string(wanted.inputs) + " inputs, found " + std::to_string(found.outputs) +
           " and " + std::to_string(found.inputs);
  }
  if (!fitsItself(operation, static_cast<size_t>(rank)))
    return "expected this rank's own input and output to be of one size";
  const size_t item = itemSize(issue.item);
  const auto whole = [item](const Buffer& one) { return one.bytes % item == 0; };
  if (!std::ranges::all_of(operation.outputs, whole) ||
      !std::ranges::all_of(operation.inputs, whole))
    return "expected whole items";
  return {};
}

}  // namespace

std::variant<Operation, std::string> operationOf(const Issue& issue, const ServedEngine& memory,
                                                 int rank, int size) {
  Operation operation;
  operation.kind = issue.op;
  operation.dtype = issue.item;
  operation.reduce = issue.reduction;
  operation.root = issue.peer;
  operation.peer = issue.peer;
  operation.tag = issue.tag;
  operation.timeout = milliseconds(issue.limit_ms);
  operation.outputs = buffersOf(issue.outputs, memory);
  operation.inputs = buffersOf(issue.inputs, memory);
  if (issue.op == OpKind::kReduce && issue.peer != rank) operation.outputs.clear();
  std::string problem = problemOf(issue, operation, rank, size);
  if (!problem.empty()) return std::string(toString(issue.op)) + ": " + std::move(problem);
  return operation;
}

}  // namespace torchft_ext::child
