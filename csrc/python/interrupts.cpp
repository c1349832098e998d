#include "python/interrupts.h"

#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <memory>
#include <system_error>
#include <utility>

#include "base/fork.h"
#include "base/mutex.h"
#include "base/threads.h"
#include "base/unique_fd.h"
#include "host/process.h"
#include "python/held_error.h"

namespace py = pybind11;

namespace torchft_ext {
namespace {

// A main thread that runs Python answers within microseconds; one that waits for the GIL behind
// others, within tens of milliseconds.
constexpr milliseconds kPatience{250};
constexpr milliseconds kLastChance{50};
constexpr uint8_t kStop = 0;  // no signal has this number

// One question to the main thread; the last one counts.
struct Question {
  Mutex mutex;
  CondVar changed;
  uintptr_t asked GUARDED_BY(mutex) = 0;
  uintptr_t answered GUARDED_BY(mutex) = 0;
  bool stopping GUARDED_BY(mutex) = false;

  uintptr_t next() {
    MutexLock lock(mutex);
    return ++asked;
  }
  void answer(uintptr_t number) {
    MutexLock lock(mutex);
    answered = number;
    changed.notifyAll();
  }
  void stop() {
    MutexLock lock(mutex);
    stopping = true;
    changed.notifyAll();
  }
  // Also true when there is nothing to be done any more.
  bool settledWithin(Duration patience) {
    const Deadline deadline = Deadline::after(patience);
    MutexLock lock(mutex);
    while (answered != asked && !stopping && !deadline.expired())
      changed.waitUntil(mutex, deadline);
    return answered == asked || stopping;
  }
};

PerProcess<Question> question;

int onMainThread(void* number) {
  question.get().answer(reinterpret_cast<uintptr_t>(number));
  return 0;
}

// A handler of the user's may want the operation to go on.
bool pythonsOwnHandlerIsInstalled() {
  if (!interpreterUsable()) return false;
  const py::gil_scoped_acquire gil;
  try {
    const py::module_ module = py::module_::import("signal");
    return module.attr("getsignal")(SIGINT).is(module.attr("default_int_handler"));
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("torchft_ext: a look at the handler of SIGINT");
    return false;
  }
}

void handleInterrupt() {
  Question& asked = question.get();
  // A queue of pending calls that is full is not being served either.
  Py_AddPendingCall(&onMainThread, reinterpret_cast<void*>(asked.next()));
  if (asked.settledWithin(kPatience)) return;
  if (!pythonsOwnHandlerIsInstalled() || asked.settledWithin(kLastChance)) return;
  failOutstanding("interrupted (SIGINT)");
}

void readSignals(int reading) {
  while (true) {
    uint8_t number = kStop;
    const ssize_t count = ::read(reading, &number, 1);
    if (count < 0 && errno == EINTR) continue;
    if (count != 1 || number == kStop) return;
    if (number == SIGINT) handleInterrupt();
  }
}

class SignalThread {
 public:
  int pipe() {
    MutexLock lock(mutex_);
    if (stopped_) return -1;
    if (!writing_) start();
    return writing_.get();
  }

  bool stop(Deadline deadline) {
    OwnedThread thread;
    int writing = -1;
    {
      MutexLock lock(mutex_);
      if (std::exchange(stopped_, true) || !writing_) return true;
      thread = std::move(thread_);
      writing = writing_.get();
    }
    question.get().stop();
    const bool told = ::write(writing, &kStop, 1) == 1;
    if (told && thread.join(deadline)) return true;
    thread.abandon("the Python interpreter does not let it go");
    return false;
  }

 private:
  void start() REQUIRES(mutex_) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0)
      throw std::system_error(errno, std::generic_category(), "no pipe for signals");
    UniqueFd reading(ends[0]);
    UniqueFd writing(ends[1]);
    // Python's signal handler must not block; the thread does.
    if (::fcntl(writing.get(), F_SETFL, O_NONBLOCK) != 0)
      throw std::system_error(errno, std::generic_category(), "the pipe for signals");
    thread_ = OwnedThread("ft-signals", [fd = reading.get()] { readSignals(fd); });
    reading_ = std::move(reading);
    writing_ = std::move(writing);
  }

  Mutex mutex_;  // the registry of threads takes its own under it, when the thread starts
  bool stopped_ GUARDED_BY(mutex_) = false;
  OwnedThread thread_ GUARDED_BY(mutex_);
  UniqueFd reading_ GUARDED_BY(mutex_);
  UniqueFd writing_ GUARDED_BY(mutex_);
};

PerProcess<SignalThread> signal_thread;

}  // namespace

int interruptPipe() {
  return signal_thread.get().pipe();
}

bool stopInterruptWatch(Deadline deadline) {
  return signal_thread.get().stop(deadline);
}

}  // namespace torchft_ext
