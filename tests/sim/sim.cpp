#include "sim.h"

#include <torch/library.h>

#include <map>
#include <sstream>
#include <stdexcept>

#include "sim_segments.h"

namespace torchft_ext::sim {
namespace {

// Graphs and gates by number, for Python.
template <class T>
class Numbered {
 public:
  int64_t add(std::shared_ptr<T> thing) {
    MutexLock lock(mutex_);
    things_[++last_] = std::move(thing);
    return last_;
  }
  std::shared_ptr<T> get(int64_t number) {
    MutexLock lock(mutex_);
    return things_.at(number);
  }
  void remove(int64_t number) {
    std::shared_ptr<T> last;  // goes without the lock
    MutexLock lock(mutex_);
    last = std::move(things_.at(number));
    things_.erase(number);
  }

 private:
  Mutex mutex_;
  int64_t last_ GUARDED_BY(mutex_) = 0;
  std::map<int64_t, std::shared_ptr<T>> things_ GUARDED_BY(mutex_);
};

Numbered<Graph>& graphs() {
  static auto* const graphs = new Numbered<Graph>;
  return *graphs;
}

Numbered<Gate>& gates() {
  static auto* const gates = new Numbered<Gate>;
  return *gates;
}

int64_t beginCapture() {
  return graphs().add(currentStream().beginCapture());
}
bool endCapture() {
  return currentStream().endCapture();
}

void replay(int64_t number) {
  const std::shared_ptr<Graph> graph = graphs().get(number);
  currentStream().enqueue([graph, tasks = graph->launch()] {
    for (const Task& task : tasks) task();
  });
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out + "\"";
}

}  // namespace

std::string report() {
  std::ostringstream out;
  const char* comma = "";
  out << "{\"violations\": [";
  for (const std::string& one : Faults::instance().violations()) {
    out << comma << quoted(one);
    comma = ", ";
  }
  out << "], \"counts\": {";
  comma = "";
  for (const auto& [name, number] : Faults::instance().counts()) {
    out << comma << quoted(name) << ": " << number;
    comma = ", ";
  }
  const NcclSnapshot snapshot = ncclSnapshot();
  out << "}, \"live_communicators\": " << snapshot.communicators
      << ", \"live_roots\": " << snapshot.roots
      << ", \"captured_communicators\": " << snapshot.captured
      << ", \"live_allocations\": " << liveAllocations()
      << ", \"live_segments\": " << Segments::instance().live() << "}";
  return out.str();
}

std::shared_ptr<const NcclPlatform> platform() {
  static const auto platform = [] {
    auto made = std::make_shared<NcclPlatform>();
    made->device_type = c10::DeviceType::PrivateUse1;
    made->nccl = makeSimNccl();
    made->cuda = makeSimCuda();
    return made;
  }();
  return platform;
}

void install() {
  setNcclPlatformForTest(platform());
}

TORCH_LIBRARY(torchft_ext_sim, m) {
  m.def("install() -> ()", install);
  m.def("inject(str line) -> ()", [](const std::string& line) { Faults::instance().inject(line); });
  m.def("share_memory(bool share) -> ()", shareMemory);
  m.def("report() -> str", [] { return report(); });
  m.def("reset() -> ()", [] { Faults::instance().reset(); });
  m.def("stall() -> int", [] { return gates().add(stall(currentStream().handle())); });
  m.def("release(int gate) -> ()", [](int64_t gate) {
    gates().get(gate)->open();
    gates().remove(gate);
  });
  m.def("begin_capture() -> int", beginCapture);
  m.def("end_capture() -> bool", endCapture);
  m.def("replay(int graph) -> ()", replay);
  m.def("free_graph(int graph) -> ()", [](int64_t graph) { graphs().remove(graph); });
}

}  // namespace torchft_ext::sim

extern "C" void torchft_ext_sim_install() {
  torchft_ext::sim::install();
}
