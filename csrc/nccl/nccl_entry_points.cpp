#include "nccl/nccl_entry_points.h"

#include <dlfcn.h>

namespace torchft_ext {
namespace {

// Looks names up in one library, and remembers the required ones that are not there.
class Lookup {
 public:
  explicit Lookup(void* library) : library_(library) {}
  template <typename Function>
  void optional(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(::dlsym(library_, name));
  }
  template <typename Function>
  void required(Function*& function, const char* name) {
    optional(function, name);
    if (function == nullptr) missing_ += std::string(missing_.empty() ? "" : ", ") + name;
  }
  const std::string& missing() const { return missing_; }

 private:
  void* library_;
  std::string missing_;
};

#define TFT_REQUIRED(name) lookup.required(entry.name, "nccl" #name)
#define TFT_OPTIONAL(name) lookup.optional(entry.name, "nccl" #name)

void lookUpRequired(Lookup& lookup, NcclEntryPoints& entry) {
  TFT_REQUIRED(GetVersion);
  TFT_REQUIRED(GetLastError);
  TFT_REQUIRED(GetUniqueId);
  TFT_REQUIRED(CommInitRankConfig);
  TFT_REQUIRED(CommGetAsyncError);
  TFT_REQUIRED(CommFinalize);
  TFT_REQUIRED(CommDestroy);
  TFT_REQUIRED(CommAbort);
  TFT_REQUIRED(GroupStart);
  TFT_REQUIRED(GroupEnd);
  TFT_REQUIRED(AllReduce);
  TFT_REQUIRED(Broadcast);
  TFT_REQUIRED(Reduce);
  TFT_REQUIRED(AllGather);
  TFT_REQUIRED(ReduceScatter);
  TFT_REQUIRED(Send);
  TFT_REQUIRED(Recv);
  TFT_REQUIRED(RedOpCreatePreMulSum);
  TFT_REQUIRED(RedOpDestroy);
}

void lookUpOptional(Lookup& lookup, NcclEntryPoints& entry) {
  TFT_OPTIONAL(CommInitRankScalable);
  TFT_OPTIONAL(CommRevoke);
  TFT_OPTIONAL(CommRegister);
  TFT_OPTIONAL(CommDeregister);
}

#undef TFT_REQUIRED
#undef TFT_OPTIONAL

}  // namespace

std::string lookUpNccl(void* library, NcclEntryPoints& entry) {
  Lookup lookup(library);
  lookUpRequired(lookup, entry);
  lookUpOptional(lookup, entry);
  return lookup.missing();
}

}  // namespace torchft_ext
