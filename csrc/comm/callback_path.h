// Where an operation was issued in the tree of callbacks, so that all ranks call it by one name.
//
// Threads issue collectives in program order: the same order on all ranks. Callbacks of futures run
// beside them, sooner on one rank than on another, so what a callback issues has no place in that
// order. Its name says where it comes from instead: which collective's future, which callback of
// that future, and the how-many-th collective of that callback in that group. A callback's own
// future continues the path. Values: copied freely, any thread, nothing blocks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace torchft_ext {

// One generation of one group, alike on all its ranks.
uint64_t placeOf(const std::string& group, int64_t generation);

class CallbackPath {
 public:
  // Collective number `index` of the threads' order. what, seq: for errors: "allreduce #3".
  static CallbackPath ofCollective(uint64_t place, uint64_t index, const char* what, int64_t seq);
  CallbackPath callback(uint64_t index) const;  // number `index` of those that its future was given
  CallbackPath collective(uint64_t place, uint64_t ordinal) const;  // that this callback issues

  // The name among the operations of that place. The group's own name is no part of it where all of
  // the path lies in one group.
  uint64_t nameIn(uint64_t place) const;
  std::string root() const;  // "allreduce #3"

 private:
  CallbackPath extended(uint64_t what, uint64_t number) const;

  uint64_t within_ = 0;    // as if there were one group
  uint64_t across_ = 0;    // with the groups' names
  uint64_t place_ = 0;     // of the first operation
  bool one_place_ = true;  // and of all others
  const char* what_ = "";  // of static storage
  int64_t seq_ = 0;
};

// "allreduce issued in a callback of broadcast #3"
std::string inCallbackOf(const std::string& what, const CallbackPath& path);

// While one exists, its thread is in a callback. Scopes nest: the innermost counts.
class CallbackScope {
 public:
  // nullopt: of a future that has no path (of a send, a receive, several operations).
  explicit CallbackScope(std::optional<CallbackPath> path);
  ~CallbackScope();
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;

  static CallbackScope* present();  // of the calling thread; null: it is in no callback
  static bool isNamed() { return present() != nullptr && present()->path_; }

  // The path of the next collective that this callback issues there. nullopt: it has none.
  std::optional<CallbackPath> next(uint64_t place);

 private:
  const std::optional<CallbackPath> path_;
  std::map<uint64_t, uint64_t> issued_;  // by place
  CallbackScope* const outer_;
};

}  // namespace torchft_ext
