// Every thread of the library is started here: named, all signals blocked, counted, and known to
// stats(). A thread that could not be ended within its bound is abandoned: reported once in the
// log, kept in the count of stuck threads, and never joined (it may sit in a foreign library for
// good).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"

namespace torchft_ext {

// Owner of one running thread. The body runs with all signals blocked; an exception that leaves it
// ends the process's promise, not the process: it is logged as an error and the thread ends.
class OwnedThread {
 public:
  OwnedThread() = default;
  OwnedThread(std::string name, std::function<void()> body);
  OwnedThread(OwnedThread&&) noexcept = default;
  OwnedThread& operator=(OwnedThread&&) noexcept;
  ~OwnedThread();  // must have been joined or abandoned; abandons (and logs) otherwise

  bool isSelf() const;
  bool running() const;
  // Waits until the body has returned. False: it had not by the deadline; still owned.
  bool join(Deadline deadline);
  // Gives the thread up: it is detached, logged, and counted as stuck until its body returns.
  void abandon(const std::string& why);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

struct ThreadSnapshot {
  std::vector<std::string> running;  // names, sorted
  int stuck = 0;
};
ThreadSnapshot threadSnapshot();

}  // namespace torchft_ext
