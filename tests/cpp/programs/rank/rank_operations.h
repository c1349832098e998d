// The operations that a rank of the failure matrix runs, each with buffers of its own and a check
// of every value.
#pragma once

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/group.h"

namespace torchft_ext {

class RankOperations {
 public:
  RankOperations(Group& group, std::string name, size_t elements)
      : group_(group), name_(std::move(name)), elements_(elements) {}

  // Issues it (send/recv: both of a ring), waits. Null: success, and every value was right; throws
  // if one was wrong.
  FailurePtr runOnce() {
    prepare();
    std::vector<std::shared_ptr<OpState>> states;
    for (Operation& operation : operations()) states.push_back(group_.issue(std::move(operation)));
    FailurePtr failure;
    for (auto& state : states) {
      if (!state->wait(Deadline::after(std::chrono::seconds(120))))
        throw std::runtime_error("an operation hangs");
      if (!failure) failure = state->failure();
    }
    if (!failure) verify();
    return failure;
  }

  // After release: marks every buffer; unchanged() says whether all still carry the mark.
  void mark() {
    for (auto* buffer : {&input_, &output_}) std::fill(buffer->begin(), buffer->end(), kMark);
  }
  bool unchanged() const {
    for (const auto* buffer : {&input_, &output_}) {
      for (float value : *buffer) {
        if (value != kMark) return false;
      }
    }
    return true;
  }

 private:
  static constexpr float kMark = -12345.0F;

  float mine() const { return static_cast<float>(group_.rank() + 1); }
  float sum() const {
    const int size = group_.size();
    return static_cast<float>(size * (size + 1) / 2);
  }

  void prepare() {
    const auto size = static_cast<size_t>(group_.size());
    const bool wide_input = name_ == "reduce_scatter" || name_ == "alltoall";
    const bool wide_output = name_ == "allgather" || name_ == "alltoall";
    input_.assign(wide_input ? elements_ * size : elements_, mine());
    output_.assign(wide_output ? elements_ * size : elements_,
                   name_ == "allreduce" ? mine() : 0.0F);
    if (name_ == "broadcast" && group_.rank() == 0) output_ = input_;
  }

  Buffer slice(std::vector<float>& values, size_t index) const {
    return {reinterpret_cast<uint8_t*>(values.data() + index * elements_),
            elements_ * sizeof(float)};
  }
  std::vector<Buffer> slices(std::vector<float>& values) const {
    std::vector<Buffer> all;
    for (size_t i = 0; i < static_cast<size_t>(group_.size()); ++i) all.push_back(slice(values, i));
    return all;
  }

  std::vector<Operation> operations() {
    Operation operation;
    operation.dtype = DType::kFloat;
    if (name_ == "sendrecv") return ring();
    if (name_ == "allreduce") {
      operation.kind = OpKind::kAllreduce;
      operation.outputs = {slice(output_, 0)};
    } else if (name_ == "broadcast") {
      operation.kind = OpKind::kBroadcast;
      operation.outputs = {slice(output_, 0)};
    } else if (name_ == "allgather") {
      operation.kind = OpKind::kAllgather;
      operation.inputs = {slice(input_, 0)};
      operation.outputs = slices(output_);
    } else if (name_ == "reduce_scatter") {
      operation.kind = OpKind::kReduceScatter;
      operation.inputs = slices(input_);
      operation.outputs = {slice(output_, 0)};
    } else if (name_ == "alltoall") {
      operation.kind = OpKind::kAlltoall;
      operation.inputs = slices(input_);
      operation.outputs = slices(output_);
    } else if (name_ == "barrier") {
      operation.kind = OpKind::kBarrier;
    } else {
      throw std::invalid_argument("unknown operation " + name_);
    }
    return {operation};
  }

  std::vector<Operation> ring() {
    const int size = group_.size();
    Operation send;
    send.kind = OpKind::kSend;
    send.dtype = DType::kFloat;
    send.peer = (group_.rank() + 1) % size;
    send.inputs = {slice(input_, 0)};
    Operation recv;
    recv.kind = OpKind::kRecv;
    recv.dtype = DType::kFloat;
    recv.peer = (group_.rank() + size - 1) % size;
    recv.outputs = {slice(output_, 0)};
    return {send, recv};
  }

  float expected(size_t index) const {
    if (name_ == "allreduce" || name_ == "reduce_scatter") return sum();
    if (name_ == "broadcast") return 1.0F;
    if (name_ == "allgather" || name_ == "alltoall")
      return static_cast<float>(index / elements_ + 1);
    if (name_ == "sendrecv") {
      const int size = group_.size();
      return static_cast<float>((group_.rank() + size - 1) % size + 1);
    }
    return 0.0F;  // barrier: nothing is written
  }

  void verify() const {
    for (size_t i = 0; i < output_.size(); ++i) {
      if (output_[i] == expected(i)) continue;
      throw std::runtime_error(name_ + " succeeded with a wrong value: element " +
                               std::to_string(i) + " is " + std::to_string(output_[i]) +
                               ", expected " + std::to_string(expected(i)));
    }
  }

  Group& group_;
  const std::string name_;
  const size_t elements_;
  std::vector<float> input_;
  std::vector<float> output_;
};

}  // namespace torchft_ext
