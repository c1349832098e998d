// The simulated device's streams, events and graphs.
//
// A stream is an ordered queue that a thread of its own works off; the thread starts with the first
// task and lives as long as the process, as do streams. An event is a mark in a stream. A graph is
// what was enqueued while it was captured; a replay runs it as one task, in the order of capture.
//
// Owner: streams belong to the process; events and graphs are shared by tasks and handles. Threads:
// any. Only synchronize() and a task that waits (on its stream's thread) block, without limit, as
// CUDA's do. Misuse is recorded as a violation (sim_faults.h), not thrown.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"

namespace torchft_ext::sim {

using Task = std::function<void()>;

class SimStream;

class Graph {
 public:
  ~Graph();  // what it kept is let go; frees what was freed during its capture
  void add(Task task);
  void addAtLaunch(std::function<Task()> make);  // makes its task anew when a replay is enqueued
  void atEnd(Task task);                         // when the graph goes
  void addStream(SimStream* stream);
  std::vector<SimStream*> streams() const;
  std::vector<Task> launch() const;  // the tasks of a replay that is enqueued now
  const uint64_t id = next_id++;
  bool capturing() const { return capturing_; }
  void end() { capturing_ = false; }

 private:
  static inline std::atomic<uint64_t> next_id{1};
  std::atomic<bool> capturing_{true};  // until the capturing thread ends it
  mutable Mutex mutex_;
  std::vector<std::function<Task()>> tasks_ GUARDED_BY(mutex_);
  std::vector<Task> at_end_ GUARDED_BY(mutex_);
  std::vector<SimStream*> streams_ GUARDED_BY(mutex_);
};

class SimEvent {
 public:
  SimEvent(int device, bool timed) : device(device), timed(timed) { live(1); }
  ~SimEvent() { live(-1); }
  const int device;
  const bool timed;

  uint64_t schedule();            // a new recording: its number
  void happened(uint64_t which);  // on the stream's thread
  uint64_t scheduled() const;
  bool done() const;
  void await(uint64_t which);  // blocks
  Clock::time_point at() const;

  // Recorded in a capture: the graph, and how much its stream had done then.
  struct Captured {
    std::weak_ptr<Graph> graph;
    SimStream* stream = nullptr;
    uint64_t position = 0;
  };
  void setCaptured(Captured captured);
  Captured captured() const;

 private:
  static void live(int delta);

  mutable Mutex mutex_;
  CondVar happened_;
  uint64_t scheduled_ GUARDED_BY(mutex_) = 0;
  uint64_t done_ GUARDED_BY(mutex_) = 0;
  Clock::time_point at_ GUARDED_BY(mutex_);
  Captured captured_ GUARDED_BY(mutex_);
};

class SimStream {
 public:
  SimStream(int device, int64_t id) : device(device), id(id) {}
  const int device;
  const int64_t id;
  c10::Stream handle() const;

  void enqueue(Task task);
  void record(const std::shared_ptr<SimEvent>& event);
  void block(const std::shared_ptr<SimEvent>& event);
  // In a capture: for what will have been recorded last, outside of it, when a replay is enqueued.
  void blockExternal(const std::shared_ptr<SimEvent>& event);
  bool idle() const;
  void synchronize();

  // Between a library call that answered "in progress" and its end: nobody else may enqueue here.
  void launchPending(bool pending);
  void enqueueLaunch(Task task);
  // The allocator's own mark: part of no capture, allowed at any time.
  void enqueueRetire(Task task) { push(std::move(task)); }

  std::shared_ptr<Graph> beginCapture();
  std::shared_ptr<Graph> capture() const;  // null: not being captured
  // False: a stream that was drawn in was not joined again, as CUDA requires.
  bool endCapture();

 private:
  void push(Task task);
  void work();
  void joinCapture(const std::shared_ptr<Graph>& graph);
  void noteJoined(uint64_t position);

  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<Task> tasks_ GUARDED_BY(mutex_);
  uint64_t enqueued_ GUARDED_BY(mutex_) = 0;
  uint64_t finished_ GUARDED_BY(mutex_) = 0;
  bool started_ GUARDED_BY(mutex_) = false;
  int pending_launches_ GUARDED_BY(mutex_) = 0;
  std::shared_ptr<Graph> capture_ GUARDED_BY(mutex_);
  uint64_t captured_tasks_ GUARDED_BY(mutex_) = 0;
  uint64_t joined_tasks_ GUARDED_BY(mutex_) = 0;
};

// While a capture is going on anywhere in the process, queries by threads that have not relaxed
// their capture mode are violations.
void checkQueryAllowed(const char* what);
bool captureForbids();
class RelaxQueries {
 public:
  RelaxQueries();
  ~RelaxQueries();
};

double elapsedMs(const SimEvent& from, const SimEvent& to);

}  // namespace torchft_ext::sim
