// A libnccl that does nothing but say how it was called, for tests of who calls it.
// STUB_NCCL_VERSION (22809): the version it tells; 0: it does not tell one.
// STUB_NCCL_RESULT (0): what every call but that returns.
// Compiled with TFT_STUB_EMPTY it has no function but that of the version.
#include <cstddef>
#include <cstdlib>
#include <sstream>
#include <string>
#include <type_traits>

#include "nccl/nccl_entry_points.h"

using namespace torchft_ext;  // NOLINT: nccl.h's functions are global
using Stream = NativeStream;

namespace {

std::string calls;

int fromEnvironment(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

template <typename Argument>
void write(std::ostream& out, Argument argument) {
  if constexpr (std::is_pointer_v<Argument>)
    out << ' ' << reinterpret_cast<size_t>(argument);
  else
    out << ' ' << argument;
}

template <typename... Arguments>
int called(const char* name, Arguments... arguments) {
  std::ostringstream out;
  out << name;
  (write(out, arguments), ...);
  calls += out.str() + ";";
  return fromEnvironment("STUB_NCCL_RESULT", 0);
}

[[maybe_unused]] std::string text(const NcclConfig* config) {
  std::ostringstream out;
  out << "config " << config->size << '/' << config->version << " blocking " << config->blocking
      << " share " << config->split_share;
  return out.str();
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = fromEnvironment("STUB_NCCL_VERSION", 22809);
  return *version == 0 ? 3 : 0;
}

#ifndef TFT_STUB_EMPTY

// The calls since the last question.
const char* stubNcclCalls() {
  static std::string told;
  told.swap(calls);
  calls.clear();
  return told.c_str();
}

const char* ncclGetLastError(NcclComm comm) {
  return comm == nullptr ? nullptr : "its last error";
}
int ncclGetUniqueId(NcclUniqueId* id) {
  id->bytes[127] = 7;
  return called("GetUniqueId");
}
int ncclCommInitRankConfig(NcclComm* comm, int size, NcclUniqueId id, int rank,
                           NcclConfig* config) {
  *comm = reinterpret_cast<NcclComm>(size_t{77});
  return called("CommInitRankConfig", size, int{id.bytes[127]}, rank, text(config));
}
int ncclCommInitRankScalable(NcclComm* comm, int size, int rank, int count, NcclUniqueId* ids,
                             NcclConfig* config) {
  *comm = reinterpret_cast<NcclComm>(size_t{78});
  return called("CommInitRankScalable", size, rank, count, int{ids[count - 1].bytes[0]},
                text(config));
}
int ncclCommGetAsyncError(NcclComm comm, int* state) {
  *state = 6;
  return called("CommGetAsyncError", comm);
}
int ncclCommFinalize(NcclComm comm) {
  return called("CommFinalize", comm);
}
int ncclCommDestroy(NcclComm comm) {
  return called("CommDestroy", comm);
}
int ncclCommAbort(NcclComm comm) {
  return called("CommAbort", comm);
}
int ncclCommRevoke(NcclComm comm, int flags) {
  return called("CommRevoke", comm, flags);
}
int ncclCommRegister(NcclComm comm, void* data, size_t bytes, void** handle) {
  *handle = reinterpret_cast<void*>(size_t{81});
  return called("CommRegister", comm, data, bytes);
}
int ncclCommDeregister(NcclComm comm, void* handle) {
  return called("CommDeregister", comm, handle);
}
int ncclGroupStart() {
  return called("GroupStart");
}
int ncclGroupEnd() {
  return called("GroupEnd");
}
int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, NcclComm comm,
                  Stream stream) {
  return called("AllReduce", in, out, count, type, op, comm, stream);
}
int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, NcclComm comm,
                  Stream stream) {
  return called("Broadcast", in, out, count, type, root, comm, stream);
}
int ncclReduce(const void* in, void* out, size_t count, int type, int op, int root, NcclComm comm,
               Stream stream) {
  return called("Reduce", in, out, count, type, op, root, comm, stream);
}
int ncclAllGather(const void* in, void* out, size_t count, int type, NcclComm comm, Stream stream) {
  return called("AllGather", in, out, count, type, comm, stream);
}
int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, NcclComm comm,
                      Stream stream) {
  return called("ReduceScatter", in, out, count, type, op, comm, stream);
}
int ncclSend(const void* in, size_t count, int type, int peer, NcclComm comm, Stream stream) {
  return called("Send", in, count, type, peer, comm, stream);
}
int ncclRecv(void* out, size_t count, int type, int peer, NcclComm comm, Stream stream) {
  return called("Recv", out, count, type, peer, comm, stream);
}
int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, NcclComm comm) {
  *op = 5;
  return called("RedOpCreatePreMulSum", scalar, type, residence, comm);
}
int ncclRedOpDestroy(int op, NcclComm comm) {
  return called("RedOpDestroy", op, comm);
}

#endif
}
