#include "sim_stream.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <thread>
#include <utility>

#include "sim_faults.h"

namespace torchft_ext::sim {
namespace {

std::atomic<int> captures{0};  // written by beginCapture() and endCapture() of any stream
thread_local int relaxed = 0;

}  // namespace

Graph::~Graph() {
  std::vector<Task> at_end;
  {
    MutexLock lock(mutex_);
    at_end.swap(at_end_);
  }
  for (const Task& task : at_end) task();
}

void Graph::add(Task task) {
  addAtLaunch([task = std::move(task)] { return task; });
}

void Graph::addAtLaunch(std::function<Task()> make) {
  MutexLock lock(mutex_);
  tasks_.push_back(std::move(make));
}

void Graph::atEnd(Task task) {
  MutexLock lock(mutex_);
  at_end_.push_back(std::move(task));
}

void Graph::addStream(SimStream* stream) {
  MutexLock lock(mutex_);
  streams_.push_back(stream);
}

std::vector<SimStream*> Graph::streams() const {
  MutexLock lock(mutex_);
  return streams_;
}

std::vector<Task> Graph::launch() const {
  std::vector<Task> made;
  MutexLock lock(mutex_);
  for (const std::function<Task()>& make : tasks_) made.push_back(make());
  return made;
}

void SimEvent::live(int delta) {
  Faults::instance().count("live_events", delta);
}

uint64_t SimEvent::schedule() {
  MutexLock lock(mutex_);
  captured_ = {};
  return ++scheduled_;
}

void SimEvent::happened(uint64_t which) {
  MutexLock lock(mutex_);
  if (which <= done_) return;
  done_ = which;
  at_ = Clock::now();
  happened_.notifyAll();
}

uint64_t SimEvent::scheduled() const {
  MutexLock lock(mutex_);
  return scheduled_;
}

bool SimEvent::done() const {
  MutexLock lock(mutex_);
  return done_ == scheduled_;
}

void SimEvent::await(uint64_t which) {
  MutexLock lock(mutex_);
  while (done_ < which) happened_.waitUntil(mutex_, Deadline::never());
}

Clock::time_point SimEvent::at() const {
  MutexLock lock(mutex_);
  return at_;
}

void SimEvent::setCaptured(Captured captured) {
  MutexLock lock(mutex_);
  captured_ = std::move(captured);
}

SimEvent::Captured SimEvent::captured() const {
  MutexLock lock(mutex_);
  return captured_;
}

c10::Stream SimStream::handle() const {
  const c10::Device on(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
  return c10::Stream(c10::Stream::UNSAFE, on, id);
}

void SimStream::enqueue(Task task) {
  std::shared_ptr<Graph> graph;
  {
    MutexLock lock(mutex_);
    if (pending_launches_ > 0)
      violation("work was enqueued on a stream while a launch on it was in progress");
    graph = capture_;
    if (graph) ++captured_tasks_;
  }
  if (graph) {
    graph->add(std::move(task));
  } else {
    push(std::move(task));
  }
}

void SimStream::launchPending(bool pending) {
  MutexLock lock(mutex_);
  pending_launches_ += pending ? 1 : -1;
}

void SimStream::enqueueLaunch(Task task) {
  launchPending(false);
  enqueue(std::move(task));
}

void SimStream::push(Task task) {
  MutexLock lock(mutex_);
  tasks_.push_back(std::move(task));
  ++enqueued_;
  changed_.notifyAll();
  if (started_) return;
  started_ = true;
  // Not the library's OwnedThread: its snapshot must count the library's threads only.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([this] { work(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void SimStream::work() {
  pthread_setname_np(pthread_self(), "sim-stream");
  // Kernels here run below autograd and on this thread alone: no thread team per stream.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::set_num_threads(1);
  for (;;) {
    Task task;
    {
      MutexLock lock(mutex_);
      while (tasks_.empty()) changed_.waitUntil(mutex_, Deadline::never());
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    try {
      task();
    } catch (const std::exception& error) {
      violation(std::string("a kernel failed: ") + error.what());
    }
    task = nullptr;  // what it held goes before the stream counts as idle
    MutexLock lock(mutex_);
    ++finished_;
    changed_.notifyAll();
  }
}

bool SimStream::idle() const {
  MutexLock lock(mutex_);
  return enqueued_ == finished_ && pending_launches_ == 0;
}

void SimStream::synchronize() {
  MutexLock lock(mutex_);
  if (capture_) violation("a stream was synchronised while it was captured");
  const uint64_t target = enqueued_;
  while (finished_ < target) changed_.waitUntil(mutex_, Deadline::never());
}

void SimStream::record(const std::shared_ptr<SimEvent>& event) {
  const uint64_t which = event->schedule();
  if (const std::shared_ptr<Graph> graph = capture()) {
    uint64_t position = 0;
    {
      MutexLock lock(mutex_);
      position = captured_tasks_;
    }
    event->happened(which);
    event->setCaptured({graph, this, position});
    return;
  }
  enqueue([event, which] { event->happened(which); });
}

void SimStream::block(const std::shared_ptr<SimEvent>& event) {
  const SimEvent::Captured captured = event->captured();
  if (const std::shared_ptr<Graph> graph = captured.graph.lock()) {
    if (!graph->capturing()) return violation("a stream waits for an event of an ended capture");
    joinCapture(graph);
    if (captured.stream != this) captured.stream->noteJoined(captured.position);
    return;
  }
  if (event->scheduled() == 0) return;
  if (capture()) violation("a captured stream waits for an event from outside the capture");
  enqueue([event, which = event->scheduled()] { event->await(which); });
}

void SimStream::blockExternal(const std::shared_ptr<SimEvent>& event) {
  const std::shared_ptr<Graph> graph = capture();
  if (!graph) return block(event);
  graph->addAtLaunch(
      [event] { return [event, which = event->scheduled()] { event->await(which); }; });
}

std::shared_ptr<Graph> SimStream::beginCapture() {
  auto graph = std::make_shared<Graph>();
  ++captures;
  joinCapture(graph);
  return graph;
}

std::shared_ptr<Graph> SimStream::capture() const {
  MutexLock lock(mutex_);
  return capture_;
}

void SimStream::joinCapture(const std::shared_ptr<Graph>& graph) {
  {
    MutexLock lock(mutex_);
    if (capture_ == graph) return;
    if (capture_) violation("a stream was drawn into a second capture");
    capture_ = graph;
    captured_tasks_ = 0;
    joined_tasks_ = 0;
  }
  graph->addStream(this);
}

void SimStream::noteJoined(uint64_t position) {
  MutexLock lock(mutex_);
  joined_tasks_ = std::max(joined_tasks_, position);
}

bool SimStream::endCapture() {
  const std::shared_ptr<Graph> graph = capture();
  if (!graph) return false;
  graph->end();
  bool joined = true;
  for (SimStream* stream : graph->streams()) {
    MutexLock lock(stream->mutex_);
    if (stream != this && stream->joined_tasks_ < stream->captured_tasks_) joined = false;
    stream->capture_ = nullptr;
  }
  --captures;
  return joined;
}

bool captureForbids() {
  return captures > 0 && relaxed == 0;
}

void checkQueryAllowed(const char* what) {
  if (captureForbids())
    violation(std::string(what) + " during a capture, by a thread in strict capture mode");
}

RelaxQueries::RelaxQueries() {
  ++relaxed;
}
RelaxQueries::~RelaxQueries() {
  --relaxed;
}

double elapsedMs(const SimEvent& from, const SimEvent& to) {
  if (!from.timed || !to.timed) violation("elapsed time of an event without timing");
  return toMilliseconds(to.at() - from.at());
}

}  // namespace torchft_ext::sim
