// Operations between startCoalescing() and endCoalescing(), collected to begin as one.
//
// Owner: the backend. Threads: any; what one thread collects is its own, and operations that other
// threads issue meanwhile are not touched. After an abort: nothing changes, the operations fail
// when they are issued. It never blocks. What is collected and never ended fails, and goes, with
// the next start on that thread; without one it goes with the backend.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/mutex.h"
#include "c10d/adapter/prepared.h"
#include "c10d/group/fork_guard.h"
#include "c10d/work/work_key.h"

namespace torchft_ext {

// What an operation inside a coalesced block gives its caller: the block's Work, once there is one.
// Until then wait() does nothing, since torch's synchronous calls wait at once. Where the block's
// end raised, or never came, nothing was issued: each call raises what the end raised.
class CoalescedWork : public c10d::Work {
 public:
  // The block's Work; empty until it has been issued, or where it could not be.
  struct Block {
    const ForkGuard guard;
    Mutex mutex;
    c10::intrusive_ptr<c10d::Work> work GUARDED_BY(mutex);
    std::exception_ptr error GUARDED_BY(mutex);
    c10::intrusive_ptr<c10d::Work> get();
    std::exception_ptr failure();
    void set(c10::intrusive_ptr<c10d::Work> issued);
    void fail(std::exception_ptr why);
  };

  CoalescedWork(c10d::OpType type, std::shared_ptr<Block> block);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  // RuntimeError before the block has ended.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  std::vector<at::Tensor> result() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;
  uint64_t key() const { return key_; }  // its own, beside the block's
#ifdef TORCHFT_EXT_WORK_HAS_KEY
  uint64_t getCompletionKey() const override {
    return key_;
  }
#endif
  // Out of torch's registry of works (see ft_work.h): the block's own Work takes its place there.
  void leaveRegistry();

 private:
  c10::intrusive_ptr<c10d::Work> issued() const;  // raises what the block's end raised
  c10::intrusive_ptr<c10d::Work> ended(const char* call) const;

  const uint64_t key_ = nextWorkKey();
  const bool may_be_registered_;
  const std::shared_ptr<Block> block_;
};

class Coalescing {
 public:
  struct Collected {
    std::vector<Prepared> operations;
    std::vector<Described> described;
    std::vector<c10::intrusive_ptr<CoalescedWork>> works;  // as callers have them
    std::shared_ptr<CoalescedWork::Block> block = std::make_shared<CoalescedWork::Block>();
  };

  void start();
  bool collecting();  // this thread is
  // Null: this thread is not collecting; nothing was moved from.
  c10::intrusive_ptr<c10d::Work> collect(std::vector<Prepared>& operations, Described& described);
  // RuntimeError without start().
  Collected end();

 private:
  Mutex mutex_;
  std::map<std::thread::id, Collected> by_thread_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
