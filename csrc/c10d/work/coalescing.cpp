#include "c10d/work/coalescing.h"

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

namespace torchft_ext {

c10::intrusive_ptr<c10d::Work> CoalescedWork::Block::get() {
  guard.check("this operation");
  const MutexLock lock(mutex);
  return work;
}

void CoalescedWork::Block::set(c10::intrusive_ptr<c10d::Work> issued) {
  const MutexLock lock(mutex);
  work = std::move(issued);
}

std::exception_ptr CoalescedWork::Block::failure() {
  guard.check("this operation");
  const MutexLock lock(mutex);
  return error;
}

void CoalescedWork::Block::fail(std::exception_ptr why) {
  const MutexLock lock(mutex);
  error = std::move(why);
}

CoalescedWork::CoalescedWork(c10d::OpType type, std::shared_ptr<Block> block)
    : c10d::Work(-1, type),
      may_be_registered_(c10d::allow_inflight_collective_as_graph_input()),
      block_(std::move(block)) {}

void CoalescedWork::leaveRegistry() {
  if (!may_be_registered_) return;
  c10d::unregister_work(c10::intrusive_ptr<CoalescedWork>::unsafe_reclaim_from_nonowning(this));
}

c10::intrusive_ptr<c10d::Work> CoalescedWork::issued() const {
  if (const auto failed = block_->failure()) std::rethrow_exception(failed);
  return block_->get();
}

bool CoalescedWork::isCompleted() {
  if (block_->failure()) return true;
  const auto work = block_->get();
  return work && work->isCompleted();
}

bool CoalescedWork::isSuccess() const {
  if (block_->failure()) return false;
  const auto work = block_->get();
  return !work || work->isSuccess();
}

std::exception_ptr CoalescedWork::exception() const {
  if (auto failed = block_->failure()) return failed;
  const auto work = block_->get();
  return work ? work->exception() : nullptr;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  leaveRegistry();
  const auto work = issued();
  return !work || work->wait(timeout);
}

void CoalescedWork::abort() {
  if (const auto work = block_->get()) work->abort();
}

c10::intrusive_ptr<c10d::Work> CoalescedWork::ended(const char* call) const {
  auto work = issued();
  TORCH_CHECK(work, call,
              ": the operation begins with its coalesced block, which has not ended yet");
  return work;
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  return ended("get_future()")->getFuture();
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFutureResult() {
  return ended("get_future_result()")->getFutureResult();
}

std::vector<at::Tensor> CoalescedWork::result() {
  return ended("result()")->result();
}

float CoalescedWork::getDuration() const {
  return ended("get_duration()")->getDuration();
}

uint64_t CoalescedWork::getSequencenumber() const {
  return ended("get_sequence_number()")->getSequencenumber();
}

void Coalescing::start() {
  Collected stale;  // left by a block that an exception ended; its tensors go after the lock
  {
    const MutexLock lock(mutex_);
    std::swap(stale, by_thread_[std::this_thread::get_id()]);
  }
  if (stale.works.empty()) return;
  stale.block->fail(std::make_exception_ptr(
      c10::Error({__func__, __FILE__, __LINE__},
                 "the operation was not issued: its coalesced block has never ended")));
}

bool Coalescing::collecting() {
  const MutexLock lock(mutex_);
  return by_thread_.count(std::this_thread::get_id()) > 0;
}

c10::intrusive_ptr<c10d::Work> Coalescing::collect(std::vector<Prepared>& operations,
                                                   Described& described) {
  const MutexLock lock(mutex_);
  if (by_thread_.empty()) return nullptr;
  const auto own = by_thread_.find(std::this_thread::get_id());
  if (own == by_thread_.end()) return nullptr;
  Collected& collected = own->second;
  for (Prepared& one : operations) collected.operations.push_back(std::move(one));
  auto work = c10::make_intrusive<CoalescedWork>(described.type, collected.block);
  collected.described.push_back(std::move(described));
  collected.works.push_back(work);
  return work;
}

Coalescing::Collected Coalescing::end() {
  const MutexLock lock(mutex_);
  auto own = by_thread_.extract(std::this_thread::get_id());
  TORCH_CHECK(!own.empty(), "end of a coalesced block that this thread did not start");
  return std::move(own.mapped());
}

}  // namespace torchft_ext
