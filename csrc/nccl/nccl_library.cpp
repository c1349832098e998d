#include "nccl/nccl_library.h"

#include <dlfcn.h>
#include <strings.h>

#include <cstdlib>

#include "nccl/nccl_entry_points.h"
#include "nccl/root_release.h"

namespace torchft_ext {
namespace {

constexpr int kOldestVersion = kNcclConfigVersion;
constexpr const char* kOverride = "TORCHFT_EXT_NCCL_LIB";
constexpr const char* kLibrary = "libnccl.so.2";

NcclResult result(int code) {
  return static_cast<NcclResult>(code);
}
int code(NcclType type) {
  return static_cast<int>(type);
}

class NcclLibrary : public NcclApi {
 public:
  NcclLibrary(const NcclEntryPoints& entry, int version) : entry_(entry), version_(version) {}

  int version() const override { return version_; }

  bool has(NcclFeature feature) const override {
    switch (feature) {
      case NcclFeature::kDeferredAbort:
        return version_ >= 22203;
      case NcclFeature::kScalableInit:
        return entry_.CommInitRankScalable != nullptr && version_ >= 22304;
      case NcclFeature::kFloat8:
        return version_ >= 22403;
      case NcclFeature::kSafeAbort:
        return version_ >= 22602;
      case NcclFeature::kRevoke:
        return entry_.CommRevoke != nullptr && version_ >= 22807;
    }
    return false;
  }

  std::string lastError(NcclComm comm) override {
    const char* text = entry_.GetLastError(comm);
    return text == nullptr ? std::string() : std::string(text);
  }

  NcclResult getUniqueId(NcclUniqueId* id) override { return result(entry_.GetUniqueId(id)); }
  void releaseRoot(const NcclUniqueId& id) override { releaseNcclRoot(id); }

  NcclResult init(NcclComm* comm, const NcclInit& init) override {
    NcclConfig config;
    config.blocking = init.blocking ? 1 : 0;
    if (init.ids.size() == 1)
      return result(
          entry_.CommInitRankConfig(comm, init.size, init.ids.front(), init.rank, &config));
    if (init.ids.empty() || !has(NcclFeature::kScalableInit)) return NcclResult::kInvalidArgument;
    std::vector<NcclUniqueId> ids = init.ids;
    return result(entry_.CommInitRankScalable(comm, init.size, init.rank,
                                              static_cast<int>(ids.size()), ids.data(), &config));
  }

  NcclResult asyncError(NcclComm comm, NcclResult* state) override {
    int read = 0;
    const NcclResult asked = result(entry_.CommGetAsyncError(comm, &read));
    *state = result(read);
    return asked;
  }

  NcclResult finalize(NcclComm comm) override { return result(entry_.CommFinalize(comm)); }
  NcclResult destroy(NcclComm comm) override { return result(entry_.CommDestroy(comm)); }
  NcclResult abort(NcclComm comm) override { return result(entry_.CommAbort(comm)); }

  NcclResult revoke(NcclComm comm) override {
    if (!has(NcclFeature::kRevoke)) return NcclResult::kInvalidUsage;
    return result(entry_.CommRevoke(comm, kNcclRevokeDefault));
  }

  NcclResult groupStart() override { return result(entry_.GroupStart()); }
  NcclResult groupEnd() override { return result(entry_.GroupEnd()); }

  NcclResult allReduce(const void* in, void* out, size_t count, NcclType type, NcclRedOp op,
                       NcclComm comm, NativeStream stream) override {
    return result(entry_.AllReduce(in, out, count, code(type), op, comm, stream));
  }
  NcclResult broadcast(const void* in, void* out, size_t count, NcclType type, int root,
                       NcclComm comm, NativeStream stream) override {
    return result(entry_.Broadcast(in, out, count, code(type), root, comm, stream));
  }
  NcclResult reduce(const void* in, void* out, size_t count, NcclType type, NcclRedOp op, int root,
                    NcclComm comm, NativeStream stream) override {
    return result(entry_.Reduce(in, out, count, code(type), op, root, comm, stream));
  }
  NcclResult allGather(const void* in, void* out, size_t count, NcclType type, NcclComm comm,
                       NativeStream stream) override {
    return result(entry_.AllGather(in, out, count, code(type), comm, stream));
  }
  NcclResult reduceScatter(const void* in, void* out, size_t count, NcclType type, NcclRedOp op,
                           NcclComm comm, NativeStream stream) override {
    return result(entry_.ReduceScatter(in, out, count, code(type), op, comm, stream));
  }
  NcclResult send(const void* in, size_t count, NcclType type, int peer, NcclComm comm,
                  NativeStream stream) override {
    return result(entry_.Send(in, count, code(type), peer, comm, stream));
  }
  NcclResult recv(void* out, size_t count, NcclType type, int peer, NcclComm comm,
                  NativeStream stream) override {
    return result(entry_.Recv(out, count, code(type), peer, comm, stream));
  }

  NcclResult createPreMulSum(NcclRedOp* op, const void* scalar, bool on_device, NcclType type,
                             NcclComm comm) override {
    return result(entry_.RedOpCreatePreMulSum(
        op, const_cast<void*>(scalar), code(type),
        on_device ? kNcclScalarDevice : kNcclScalarHostImmediate, comm));
  }
  NcclResult destroyRedOp(NcclRedOp op, NcclComm comm) override {
    return result(entry_.RedOpDestroy(op, comm));
  }

  NcclResult registerBuffer(NcclComm comm, void* data, size_t bytes, void** handle) override {
    if (entry_.CommRegister == nullptr) return NcclResult::kInvalidUsage;
    return result(entry_.CommRegister(comm, data, bytes, handle));
  }
  NcclResult deregisterBuffer(NcclComm comm, void* handle) override {
    if (entry_.CommDeregister == nullptr) return NcclResult::kInvalidUsage;
    return result(entry_.CommDeregister(comm, handle));
  }

 private:
  const NcclEntryPoints entry_;
  const int version_;
};

// The handle is never closed: threads of NCCL's own may be in the library until the process ends.
void* openLibrary(std::string& where) {
  if (const char* path = std::getenv(kOverride); path != nullptr && *path != '\0') {
    where = std::string(kOverride) + "=" + path;
    // NOLINTNEXTLINE(clang-analyzer-optin.taint.GenericTaint): whoever set it chose the library
    return ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  }
  where = std::string(kLibrary) + ", as loaded by torch or found by the dynamic linker";
  if (void* loaded = ::dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  return ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
}

}  // namespace

// NCCL prefers its environment to what a caller asks for (envConfigOverride() in init.cc), and then
// blocks in init and operations, where an abort is a use after free.
std::string refusedNcclEnvironment() {
  const char* blocking = std::getenv("NCCL_COMM_BLOCKING");
  if (blocking == nullptr || *blocking == '\0' || std::string(blocking) == "0") return {};
  return std::string("NCCL_COMM_BLOCKING=") + blocking +
         " makes NCCL's communicators blocking, and those cannot be aborted safely: unset it";
}

std::string refusedForBlockingCalls() {
  // By 2.31 an abort's clean-up is then put where the call that waits may run it
  // (mgmt_task_enq.cc).
  if (const char* queue = std::getenv("NCCL_ENQUEUE_REARCH_ENABLE");
      queue != nullptr && *queue != '\0' && std::string(queue) != "0")
    return std::string("NCCL_ENQUEUE_REARCH_ENABLE=") + queue +
           " is not for blocking communicators that may be aborted: unset it, or "
           "TORCHFT_EXT_NCCL_BLOCKING";
  // A barrier between the ranks of a process, which no abort ends (ncclCommIntraBarrierOut).
  if (const char* mode = std::getenv("NCCL_LAUNCH_MODE");
      mode != nullptr && ::strcasecmp(mode, "GROUP") == 0)  // as NCCL compares it
    return "NCCL_LAUNCH_MODE=GROUP is not for blocking communicators that may be aborted: unset "
           "it, "
           "or TORCHFT_EXT_NCCL_BLOCKING";
  return {};
}

std::variant<std::shared_ptr<NcclApi>, std::string> loadNcclLibrary() {
  if (std::string refused = refusedNcclEnvironment(); !refused.empty()) return refused;
  std::string where;
  void* library = openLibrary(where);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return "NCCL was not found (" + where + "): " + (why == nullptr ? "no reason given" : why);
  }
  NcclEntryPoints entry;
  if (const std::string missing = lookUpNccl(library, entry); !missing.empty())
    return "NCCL (" + where + ") has no " + missing;
  int version = 0;
  if (result(entry.GetVersion(&version)) != NcclResult::kSuccess)
    return "NCCL (" + where + ") does not tell its version";
  if (version < kOldestVersion)
    return "NCCL " + dottedVersion(version) + " (" + where + ") is too old: expected " +
           dottedVersion(kOldestVersion) + " or later";
  return std::make_shared<NcclLibrary>(entry, version);
}

}  // namespace torchft_ext
