// Members that abort at random moments and try again under one prefix.
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <random>
#include <thread>

#include "cpp/membership/rendezvous_support.h"

namespace torchft_ext {
namespace {

using namespace rendezvous_test;  // NOLINT(google-build-using-namespace)

// Members that abort at random moments and try again at once, under one prefix.
class Regroup {
 public:
  Regroup(std::vector<std::unique_ptr<Process>>& processes, unsigned seed)
      : processes_(processes), seed_(seed), nonces_(processes.size()), told_(processes.size()) {}

  void run() {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < processes_.size(); ++rank)
      threads.emplace_back([this, rank] { member(rank); });
    for (auto& thread : threads) thread.join();
  }
  // Each abort may be told to every member once.
  void verify() const {
    for (const int told : told_) EXPECT_LE(told, aborts_.load()) << "seed " << seed_;
    EXPECT_FALSE(late_.load()) << "seed " << seed_;
  }

 private:
  bool agreed(size_t rank, const Nonce& nonce) {
    MutexLock lock(mutex_);
    nonces_[rank] = nonce;
    const bool same = std::all_of(nonces_.begin(), nonces_.end(),
                                  [this](const Nonce& each) { return each == nonces_[0]; });
    done_ = done_ || (same && !nonces_[0].isZero());
    return done_;
  }

  // Null: a generation has formed.
  std::optional<Failure> attempt(size_t rank, Rendezvous& rendezvous, const Cancelled& cancelled) {
    auto outcome = rendezvous.enter();
    for (;;) {
      if (auto* failure = std::get_if<Failure>(&outcome)) return *failure;
      std::variant<std::monostate, Roster, Failure> refreshed;
      while (std::holds_alternative<std::monostate>(refreshed)) {
        if (agreed(rank, std::get<Roster>(outcome).nonce)) return std::nullopt;
        if (cancelled()) return processes_[rank]->failure(FailureKind::kAborted, 0);
        refreshed = rendezvous.refresh();
      }
      if (auto* failure = std::get_if<Failure>(&refreshed)) return *failure;
      outcome = std::get<Roster>(std::move(refreshed));
    }
  }

  void member(size_t rank) {
    std::mt19937 random(seed_ * 31 + static_cast<unsigned>(rank));
    int aborts_left = static_cast<int>(random() % 3);
    std::unique_ptr<Rendezvous> previous;
    Process& process = *processes_[rank];
    const Deadline limit = soon();
    while (!limit.expired()) {
      unsigned patience = aborts_left > 0 ? 1 + random() % 12 : ~0U;
      bool aborted = false;
      const Cancelled cancelled = [&] { return aborted = aborted || --patience == 0; };
      auto rendezvous = process.at("run", static_cast<int>(rank),
                                   static_cast<int>(processes_.size()), soon(), cancelled);
      std::optional<Failure> failure = attempt(rank, *rendezvous, cancelled);
      // The generation may have formed between this member's last look and now: then nobody else is
      // here.
      if (!failure || agreed(rank, Nonce{})) return;
      ++told_[rank];
      if (aborted) {
        --aborts_left;
        ++aborts_;
        failure = process.failure(FailureKind::kAborted, static_cast<int>(rank));
      }
      process.memory = rendezvous->publishFailure(*failure);
      previous = std::move(rendezvous);
    }
    late_ = true;
  }

  std::vector<std::unique_ptr<Process>>& processes_;
  const unsigned seed_;
  Mutex mutex_;
  std::vector<Nonce> nonces_ GUARDED_BY(mutex_);
  bool done_ GUARDED_BY(mutex_) = false;
  std::vector<int> told_;  // each member's own
  std::atomic<int> aborts_{0};
  std::atomic<bool> late_{false};
};

TEST_F(RendezvousTest, RandomAbortsAndRetriesUnderOnePrefixConvergeAndAreToldOnce) {
  for (unsigned seed = 1; seed <= 25; ++seed) {
    processes.clear();
    server = std::make_shared<MemoryStore>();
    for (unsigned i = 0; i < 2 + seed % 4; ++i) addProcess();
    Regroup regroup(processes, seed);
    regroup.run();
    regroup.verify();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace torchft_ext
