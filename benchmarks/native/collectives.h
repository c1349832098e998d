// Operations of one generation, from the call to the end of the wait. Items are floats.
#pragma once

#include <string>
#include <vector>

#include "member.h"
#include "report.h"

namespace torchft_ext::bench {

// The operations that have a size, and barrier.
const std::vector<std::string>& collectiveOps();

// Owner: the caller; one for all its measures. Every rank calls the same methods in the same order.
class Collectives {
 public:
  explicit Collectives(const Member& member) : member_(member) {}

  // Each is waited for before the next one is issued; of each the slowest rank's time. bytes: 0 for
  // barrier.
  Row measure(const std::string& op, size_t bytes);
  // Allreduces of one item, 64 of them issued before the first is waited for: the time of each.
  Row issueWithoutWait();
  // wait() on an operation that is done.
  Row waitForDone();

 private:
  // Up to two operations: sendrecv has two.
  struct Pending {
    Request first;
    Request second;
    void wait() const;
  };

  void prepare(const std::string& op, size_t bytes);
  Pending begin(const std::string& op);
  size_t agreeOnRounds(const std::string& op);
  void takeSlowest(std::vector<double>& times);
  size_t countWrong(const std::string& op);
  float expected(const std::string& op, size_t i) const;
  Row rowOf(const std::string& op, size_t bytes);

  const Member& member_;
  size_t count_ = 0;  // items of one part
  std::vector<float> in_;
  std::vector<float> out_;
};

}  // namespace torchft_ext::bench
