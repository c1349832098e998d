// Counts the views in which an elastic job does not get on: in a row, of the same members, and
// nothing succeeded in them. A value; the caller gives it the time.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.h"
#include "elastic/view.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

// Why a view came to nothing, where the cause may repeat in every view.
struct Setback {
  std::string cause;
  bool is_disagreement = false;  // between members about what they do: no later view heals it
};

// Of a view that had formed. nullopt: it has only ended: a member left, or the program aborted.
// view_over: the members have begun to decide on the next view. A loss counts: where the next view
// has the same members, the lost one lives.
std::optional<Setback> setbackOf(FailureKind kind, std::string_view how, std::string description,
                                 bool view_over);
// Of one that did not form. A timeout is none: recover() waits for late members until its limits.
std::optional<Setback> setbackOfForming(FailureKind kind, std::string_view how,
                                        std::string description, bool view_over);

class Standstill {
 public:
  static constexpr int kLeastViews = 3;  // none of which had a success
  // Causes other than disagreements may pass: they have so long, and four times the job's limit.
  // A view that stood for so long counts as progress.
  static constexpr std::chrono::seconds kLeastTime{60};
  static constexpr milliseconds kFirstPause{200};
  static constexpr milliseconds kLongestPause{2000};

  // limit: the job's, after which a silent member is left out.
  explicit Standstill(Duration limit = Duration::zero()) : limit_(limit) {}

  void add(const View& view, Setback setback, Clock::time_point now);
  // The job gets on: the count begins again.
  void clear();
  // In that view an agreement was ok. So all of its members, newcomers too, run what the others
  // run.
  void agreed(uint64_t view);

  // Before the next view is asked for, with so much time left. None after the first setback. Later
  // pauses double.
  Duration pause(Duration remaining) const;
  // Why this member gives up: how many views, of how many members, and the cause. nullopt: it goes
  // on. Where members came in after the last agreement that was ok, only the newest of them give
  // up: a wrong newcomer does not end the job. After a verdict the count begins again.
  std::optional<std::string> takeVerdict(const MemberId& self);

 private:
  bool isHopeless() const;
  bool mayGiveUp(const MemberId& self) const;

  Duration limit_;
  std::vector<Member> members_{};  // by id
  int views_ = 0;
  int disagreements_ = 0;  // of these views
  uint64_t last_ = 0;      // the number of the last one
  std::string cause_{};
  Clock::time_point first_at_{};
  Clock::time_point last_at_{};
  uint64_t agreed_ = 0;  // the newest view with an agreement that was ok
};

}  // namespace torchft_ext
