// The agreements that a member's user asks for, and what later views say of the one that is not
// answered yet. A value; it outlives views.
#pragma once

#include <optional>
#include <vector>

#include "elastic/view.h"

namespace torchft_ext {

class AskedAgreements {
 public:
  struct Place {
    uint64_t view = 0;
    uint64_t index = 0;  // in that view, from 1
  };

  // The next one in the view with that number.
  void ask(uint64_t view);
  // It is over, or nothing can be known of it any more.
  void close() { unanswered_.reset(); }
  // Of the views that are over.
  void remember(const std::vector<Outcome>& outcomes);
  // What became of the one that is open, by the time a view of that number is known. Nothing: none
  // is open, or its own view goes on. It is over then.
  std::optional<Outcome> answerBy(uint64_t view);

  const std::optional<Place>& unanswered() const { return unanswered_; }
  const Place& last() const { return last_; }

 private:
  Place last_;
  std::optional<Place> unanswered_;
  std::vector<Outcome> known_;  // of late
};

}  // namespace torchft_ext
