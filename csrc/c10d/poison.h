// Options(poison=True): an operation of a failed epoch leaves NaN in its outputs, in stream order,
// so that kernels which run on incomplete results cannot go unnoticed.
//
// Every byte becomes 0xff, whatever the dtype: NaN for floating point and complex numbers, -1 for
// signed integers, the largest value for unsigned ones, true for bool. How: each epoch has one byte
// of host memory that devices can read. Behind each operation its stream copies that byte and fills
// the outputs where it is set. The epoch's failure sets it before any stream is freed: so what the
// device finds unset was complete.
//
// Owner: the backend, as its engine. Threads: any. It never blocks by itself; form() does as the
// inner engine's.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "comm/communicator.h"

namespace torchft_ext {

// Wraps an engine to hear of each epoch's failure before the engine itself does: it subscribes to
// the lifecycle first.
class PoisonEngine : public Engine {
 public:
  PoisonEngine(std::shared_ptr<Engine> inner, c10::DeviceType device_type)
      : inner_(std::move(inner)), device_type_(device_type) {}

  const char* name() const override { return inner_->name(); }
  std::vector<std::pair<std::string, int64_t>> counters() const override {
    return inner_->counters();
  }
  std::variant<MemberRecord, Failure> describeSelf() override { return inner_->describeSelf(); }
  std::unique_ptr<Vigil> keepVigil(int size) override { return inner_->keepVigil(size); }
  Duration frozenAfter() const override { return inner_->frozenAfter(); }
  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override;

  // The epoch's byte, as a 0-dim uint8 tensor that host and devices can reach; undefined where that
  // epoch is not the latest.
  at::Tensor flagOf(int64_t epoch) const;

 private:
  // Of one epoch. byte(): who issues; making it may wait for the device. set(): any thread, and
  // never waits.
  class Flag {
   public:
    at::Tensor byte(c10::DeviceType device_type);
    void set();

   private:
    Mutex mutex_;  // byte()'s alone
    at::Tensor byte_ GUARDED_BY(mutex_);
    std::atomic<uint8_t*> address_{nullptr};  // of byte_, once it has been made; which stays
    std::atomic<bool> set_{false};
  };
  bool isNew(const std::shared_ptr<Lifecycle>& lifecycle) const;

  const std::shared_ptr<Engine> inner_;
  const c10::DeviceType device_type_;
  mutable Mutex mutex_;
  std::weak_ptr<Lifecycle> latest_ GUARDED_BY(mutex_);
  std::shared_ptr<Flag> flag_ GUARDED_BY(mutex_);
};

// Enqueues on the current stream: where the flag is set, outputs become 0xff.
void enqueuePoison(const std::vector<Buffer>& outputs, const at::Tensor& flag,
                   const c10::Device& device);
// Enqueues on the current stream: of each byte of the outputs its lowest bit.
void enqueueLowBits(const std::vector<Buffer>& outputs, const c10::Device& device);

}  // namespace torchft_ext
