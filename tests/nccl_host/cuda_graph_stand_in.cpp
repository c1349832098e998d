// The functions of the CUDA runtime for captures and graphs.
//
// A graph of the simulated device runs in the order of its capture, which any order that CUDA may
// take includes: what NCCL says of a node's dependencies is taken and not needed.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <cstring>
#include <string>

#include "cuda_handles.h"
#include "sim_faults.h"
#include "sim_stream.h"

namespace torchft_ext::nccl_host {
namespace {

thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

sim::Graph& graphOf(cudaGraph_t graph) {
  return *reinterpret_cast<sim::Graph*>(graph);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* wanted) {
  std::swap(mode, *wanted);
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  static const cudaGraphNode_t none[1] = {};
  const std::shared_ptr<sim::Graph> captured = streamOf(stream).capture();
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = captured ? captured->id : 0;
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(captured.get());
  if (nodes != nullptr) *nodes = none;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return nccl_host::cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr,
                                             nullptr);
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*,
                                                const cudaGraphEdgeData*, size_t, unsigned int) {
  return cudaSuccess;
}

cudaError_t cudaGraphAddDependencies(cudaGraph_t, const cudaGraphNode_t*, const cudaGraphNode_t*,
                                     const cudaGraphEdgeData*, size_t) {
  return cudaSuccess;
}
cudaError_t cudaGraphAddEventRecordNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                        const cudaGraphNode_t*, size_t, cudaEvent_t event) {
  *node = nullptr;
  graphOf(graph).addAtLaunch([event = eventOf(event)] {
    return [event, which = event->schedule()] { event->happened(which); };
  });
  return cudaSuccess;
}

// ---- what a graph keeps

struct Kept {
  void* object;
  cudaHostFn_t destroy;
};

cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void* object, cudaHostFn_t destroy,
                                 unsigned int references, unsigned int) {
  if (references != 1) sim::violation("NCCL made an object of a graph with several owners");
  *made = reinterpret_cast<cudaUserObject_t>(new Kept{object, destroy});
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object,
                                      unsigned int references, unsigned int flags) {
  if (references != 1 || flags != cudaGraphUserObjectMove)
    sim::violation("NCCL kept its share in an object of a graph");
  graphOf(graph).atEnd([kept = std::shared_ptr<Kept>(reinterpret_cast<Kept*>(object))] {
    kept->destroy(kept->object);
  });
  return cudaSuccess;
}

// Whether this thread began in NCCL's library: the outermost of its calls outside of libc.
bool onThreadOfNccl() {
  void* frames[64];
  for (int at = ::backtrace(frames, 64) - 1; at >= 0; --at) {
    Dl_info found;
    if (::dladdr(frames[at], &found) == 0 || found.dli_fname == nullptr) continue;
    if (std::strstr(found.dli_fname, "/libc.so") == nullptr)
      return std::strstr(found.dli_fname, "/libnccl.so") != nullptr;
  }
  return false;
}

}  // namespace

// What NCCL does on threads of its own, nobody else can relax: it is counted.
void notInCapture(const char* function) {
  if (mode != cudaStreamCaptureModeGlobal || !sim::captureForbids()) return;
  if (onThreadOfNccl()) return sim::Faults::instance().count("nccl_in_capture", 1);
  sim::violation(std::string("NCCL called ") + function +
                 " during a capture, by a thread in strict capture mode");
}

std::vector<StandIn> cudaGraphs() {
  return {
      STAND_IN(cudaThreadExchangeStreamCaptureMode),
      STAND_IN(cudaStreamGetCaptureInfo),
      STAND_IN(cudaStreamIsCapturing),
      STAND_IN(cudaStreamUpdateCaptureDependencies),
      STAND_IN(cudaGraphAddDependencies),
      STAND_IN(cudaGraphAddEventRecordNode),
      STAND_IN(cudaUserObjectCreate),
      STAND_IN(cudaGraphRetainUserObject),
  };
}

}  // namespace torchft_ext::nccl_host
