// One operation, or several that belong together, as c10d's callers see it.
//
// Owner: the caller (and torch's future callbacks through what they captured, never through this
// object). Threads: any. After a failure of the epoch: completed with it. Destruction without
// wait() is safe: the engine keeps the tensors. Only wait() blocks, without the GIL as its callers
// have it; it ends by the operation's deadline plus a second at the latest.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/mutex.h"
#include "c10d/process.h"
#include "comm/op_state.h"

namespace torchft_ext {

class FtWork : public c10d::Work {
 public:
  using States = std::vector<std::shared_ptr<OpState>>;
  using Outputs = std::vector<std::vector<at::Tensor>>;

  // states: at least one. title: a literal such as "ft:all_reduce".
  FtWork(c10d::OpType type, const char* title, const std::optional<std::vector<at::Tensor>>& inputs,
         States states, Outputs outputs);

  bool isCompleted() override;
  bool isSuccess() const override;  // false only once it has failed, as torch's own
  std::exception_ptr exception() const override;
  int sourceRank() const override;  // of recv from anyone
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  // kNoTimeout: until the operation's own deadline, at which its epoch fails. An explicit timeout
  // that runs out fails the epoch in this operation's name. Raises the failure; an exception from
  // the wait hook (a signal) ends the epoch first.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  // A list of tensors (of lists of tensors where there are several), or the failure.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  // A WorkResult; never an error.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override;

 private:
  struct EndOfProfile;
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  FailurePtr failure() const;  // the first failed state's
  void finish(OpState& state, std::chrono::milliseconds timeout) const;
  void giveUp(OpState& state, std::chrono::milliseconds timeout) const;
  bool waitFor(OpState& state, Deadline deadline) const;
  void failEpoch(FailureKind kind, const std::string& how) const;
  FuturePtr makeOnce(FuturePtr FtWork::*slot, const c10::TypePtr& type, bool* made);

  const ForkGuard guard_;
  const States states_;
  const Outputs outputs_;
  const std::shared_ptr<EndOfProfile> end_of_profile_;  // null: nobody profiles
  mutable Mutex futures_mutex_;
  FuturePtr future_;  // both under futures_mutex_, by makeOnce() alone
  FuturePtr result_future_;
};

}  // namespace torchft_ext
