#include "base/threads.h"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <map>
#include <system_error>
#include <utility>

#include "base/fork.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/shortage.h"

namespace torchft_ext {
namespace {

// All running threads of this process, by the address of their state.
class Registry {
 public:
  void add(const void* thread, const std::string& name) {
    MutexLock lock(mutex_);
    threads_[thread] = {name, false};
  }
  void remove(const void* thread) {
    MutexLock lock(mutex_);
    threads_.erase(thread);
  }
  // False: it has ended already.
  bool markStuck(const void* thread) {
    MutexLock lock(mutex_);
    const auto found = threads_.find(thread);
    if (found == threads_.end()) return false;
    found->second.stuck = true;
    return true;
  }
  ThreadSnapshot count() {
    ThreadSnapshot snapshot;
    MutexLock lock(mutex_);
    for (const auto& [thread, entry] : threads_) {
      snapshot.running.push_back(entry.name);
      if (entry.stuck) ++snapshot.stuck;
    }
    std::sort(snapshot.running.begin(), snapshot.running.end());
    return snapshot;
  }

 private:
  struct Entry {
    std::string name;
    bool stuck = false;
  };
  Mutex mutex_;
  std::map<const void*, Entry> threads_ GUARDED_BY(mutex_);
};

PerProcess<Registry> registry;
thread_local const void* current_thread = nullptr;

// Threads inherit the mask of their creator: blocked here, no signal ever reaches the new thread,
// not even while it starts.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

struct OwnedThread::State {
  State(std::string thread_name, std::function<void()> thread_body)
      : name(std::move(thread_name)), body(std::move(thread_body)) {}

  const std::string name;
  const uint64_t fork_count = forkCount();
  std::function<void()> body;  // the new thread's alone
  pthread_t handle{};          // written before anyone else has this state; used by the owner

  Mutex mutex;
  CondVar changed;
  bool done GUARDED_BY(mutex) = false;
  bool collected GUARDED_BY(mutex) = false;  // joined or detached

  // A thread of the parent does not exist in a forked child, and its mutex may be locked there for
  // good.
  bool inherited() const { return fork_count != forkCount(); }
  static void start(const std::shared_ptr<State>& state);
  static void* entry(void* argument) noexcept;
  void runBody() noexcept;
  bool takeForCollecting() EXCLUDES(mutex);
};

void OwnedThread::State::start(const std::shared_ptr<State>& state) {
  auto argument = std::make_unique<std::shared_ptr<State>>(state);
  registry.get().add(state.get(), state->name);
  int error = 0;
  {
    const SignalsBlocked blocked;
    error = pthread_create(&state->handle, nullptr, &State::entry, argument.get());
  }
  if (error != 0) {
    registry.get().remove(state.get());
    throw std::system_error(error, std::generic_category(),
                            "cannot start thread " + state->name + shortageNumbers(error));
  }
  static_cast<void>(argument.release());  // the thread's now
}

void* OwnedThread::State::entry(void* argument) noexcept {
  const std::unique_ptr<std::shared_ptr<State>> holder(
      static_cast<std::shared_ptr<State>*>(argument));
  State& state = **holder;
  current_thread = &state;
  pthread_setname_np(pthread_self(), state.name.substr(0, 15).c_str());
  state.runBody();
  registry.get().remove(&state);
  MutexLock lock(state.mutex);
  state.done = true;
  state.changed.notifyAll();
  return nullptr;
}

void OwnedThread::State::runBody() noexcept {
  try {
    body();
    body = nullptr;  // what it captured ends on this thread, before join() returns
  } catch (const std::exception& error) {
    log(LogLevel::kError, "thread " + name + " ended by an exception: " + error.what());
  } catch (...) {
    log(LogLevel::kError, "thread " + name + " ended by an exception of unknown type");
  }
}

bool OwnedThread::State::takeForCollecting() {
  MutexLock lock(mutex);
  return !std::exchange(collected, true);
}

OwnedThread::OwnedThread(std::string name, std::function<void()> body)
    : state_(std::make_shared<State>(std::move(name), std::move(body))) {
  State::start(state_);
}

OwnedThread& OwnedThread::operator=(OwnedThread&& other) noexcept {
  if (this != &other) {
    const OwnedThread previous(std::move(*this));
    state_ = std::move(other.state_);
  }
  return *this;
}

OwnedThread::~OwnedThread() {
  if (state_ == nullptr || state_->inherited() || join(Deadline::at(Clock::now()))) return;
  abandon("its owner was destroyed without joining it");
}

bool OwnedThread::isSelf() const {
  return state_ != nullptr && current_thread == state_.get();
}

bool OwnedThread::running() const {
  if (state_ == nullptr || state_->inherited()) return false;
  MutexLock lock(state_->mutex);
  return !state_->done;
}

bool OwnedThread::join(Deadline deadline) {
  if (state_ == nullptr || state_->inherited()) return true;
  if (isSelf()) return false;
  {
    MutexLock lock(state_->mutex);
    while (!state_->done) {
      if (deadline.expired()) return false;
      state_->changed.waitUntil(state_->mutex, deadline);
    }
  }
  if (state_->takeForCollecting()) pthread_join(state_->handle, nullptr);
  return true;
}

void OwnedThread::abandon(const std::string& why) {
  if (state_ == nullptr || state_->inherited() || !state_->takeForCollecting()) return;
  pthread_detach(state_->handle);
  if (registry.get().markStuck(state_.get())) {
    log(LogLevel::kWarning, "thread " + state_->name + " is left to itself: " + why);
  }
}

ThreadSnapshot threadSnapshot() {
  return registry.get().count();
}

}  // namespace torchft_ext
