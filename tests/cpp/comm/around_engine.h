// An engine double around a real one: what it does not change. A test's own overrides form().
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace torchft_ext {

class AroundEngine : public Engine {
 public:
  explicit AroundEngine(std::shared_ptr<Engine> inner) : inner_(std::move(inner)) {}

  const char* name() const override { return inner_->name(); }
  std::vector<std::pair<std::string, int64_t>> counters() const override {
    return inner_->counters();
  }
  std::variant<MemberRecord, Failure> describeSelf() override { return inner_->describeSelf(); }
  std::unique_ptr<MemberProber> makeMemberProber(int size) override {
    return inner_->makeMemberProber(size);
  }
  Duration frozenAfter() const override { return inner_->frozenAfter(); }

 protected:
  const std::shared_ptr<Engine> inner_;
};

}  // namespace torchft_ext
