// An NcclApi that does nothing but write down its calls and answer as a test told it to.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "nccl/nccl_api.h"

namespace torchft_ext {

class ScriptedNccl : public NcclApi {
 public:
  // The next answers to this call; then kSuccess (init: with a communicator in any case).
  void answer(const std::string& call, std::deque<NcclResult> results) {
    MutexLock lock(mutex_);
    answers_[call] = std::move(results);
  }
  // The call does not return before unblock().
  void block(const std::string& call) {
    MutexLock lock(mutex_);
    blocked_.insert(call);
  }
  void unblock() {
    MutexLock lock(mutex_);
    blocked_.clear();
    changed_.notifyAll();
  }
  void lack(NcclFeature feature) { lacking_.insert(feature); }  // before use
  std::vector<std::string> calls() const {
    MutexLock lock(mutex_);
    return calls_;
  }
  // The calls whose name is not one of these.
  std::vector<std::string> callsBut(const std::set<std::string>& names) const {
    std::vector<std::string> kept;
    for (const std::string& call : calls())
      if (names.count(call.substr(0, call.find(' '))) == 0) kept.push_back(call);
    return kept;
  }
  bool called(const std::string& call) const {
    const auto all = calls();
    return std::find(all.begin(), all.end(), call) != all.end();
  }

  int version() const override { return 22809; }
  bool has(NcclFeature feature) const override { return lacking_.count(feature) == 0; }
  std::string lastError(NcclComm) override { return "scripted"; }

  NcclResult getUniqueId(NcclUniqueId*) override { return note("getUniqueId", ""); }
  void releaseRoot(const NcclUniqueId&) override { note("releaseRoot", ""); }
  NcclResult init(NcclComm* comm, const NcclInit& init) override {
    *comm = reinterpret_cast<NcclComm>(++made_);
    return note("init", std::to_string(init.rank) + "/" + std::to_string(init.size));
  }
  NcclResult asyncError(NcclComm comm, NcclResult* state) override {
    *state = note("asyncError", name(comm));
    return NcclResult::kSuccess;
  }
  NcclResult finalize(NcclComm comm) override { return note("finalize", name(comm)); }
  NcclResult destroy(NcclComm comm) override { return note("destroy", name(comm)); }
  NcclResult abort(NcclComm comm) override { return note("abort", name(comm)); }
  NcclResult revoke(NcclComm comm) override { return note("revoke", name(comm)); }
  NcclResult groupStart() override { return note("groupStart", ""); }
  NcclResult groupEnd() override { return note("groupEnd", ""); }

  NcclResult allReduce(const void*, void*, size_t count, NcclType type, NcclRedOp op, NcclComm,
                       NativeStream) override {
    return note("allReduce", reduced(count, type, op));
  }
  NcclResult broadcast(const void* in, void* out, size_t count, NcclType, int root, NcclComm,
                       NativeStream) override {
    return note("broadcast", std::to_string(count) + " from " + std::to_string(root) +
                                 (in == out ? "" : " copied"));
  }
  NcclResult reduce(const void*, void* out, size_t count, NcclType type, NcclRedOp op, int root,
                    NcclComm, NativeStream) override {
    return note("reduce", reduced(count, type, op) + " to " + std::to_string(root) +
                              (out == nullptr ? "" : " here"));
  }
  NcclResult allGather(const void*, void*, size_t count, NcclType, NcclComm,
                       NativeStream) override {
    return note("allGather", std::to_string(count));
  }
  NcclResult reduceScatter(const void*, void*, size_t count, NcclType type, NcclRedOp op, NcclComm,
                           NativeStream) override {
    return note("reduceScatter", reduced(count, type, op));
  }
  NcclResult send(const void*, size_t count, NcclType, int peer, NcclComm, NativeStream) override {
    return note("send", std::to_string(count) + " to " + std::to_string(peer));
  }
  NcclResult recv(void*, size_t count, NcclType, int peer, NcclComm, NativeStream) override {
    return note("recv", std::to_string(count) + " from " + std::to_string(peer));
  }
  NcclResult createPreMulSum(NcclRedOp* op, const void*, bool on_device, NcclType type,
                             NcclComm) override {
    *op = kNcclAvg + 1;
    return note("createPreMulSum",
                std::to_string(static_cast<int>(type)) + (on_device ? " on the device" : ""));
  }
  NcclResult destroyRedOp(NcclRedOp op, NcclComm) override {
    return note("destroyRedOp", std::to_string(op));
  }
  // The handle is the address, or none where this was said.
  NcclResult registerBuffer(NcclComm comm, void* data, size_t bytes, void** handle) override {
    *handle = without_handles ? nullptr : data;
    return note("registerBuffer", name(comm) + " " + std::to_string(bytes));
  }
  NcclResult deregisterBuffer(NcclComm comm, void* handle) override {
    return note("deregisterBuffer",
                name(comm) + " " + std::to_string(reinterpret_cast<uintptr_t>(handle)));
  }
  std::atomic<bool> without_handles{false};

 private:
  static std::string name(NcclComm comm) {
    return std::to_string(reinterpret_cast<uintptr_t>(comm));
  }
  static std::string reduced(size_t count, NcclType type, NcclRedOp op) {
    return std::to_string(count) + " of " + std::to_string(static_cast<int>(type)) + " by " +
           std::to_string(op);
  }
  NcclResult note(const std::string& call, const std::string& arguments) {
    MutexLock lock(mutex_);
    calls_.push_back(arguments.empty() ? call : call + " " + arguments);
    while (blocked_.count(call) > 0) changed_.waitUntil(mutex_, Deadline::never());
    auto& answers = answers_[call];
    if (answers.empty()) return NcclResult::kSuccess;
    const NcclResult result = answers.front();
    answers.pop_front();
    return result;
  }

  std::set<NcclFeature> lacking_;
  std::atomic<uintptr_t> made_{0};
  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<std::string> calls_ GUARDED_BY(mutex_);
  std::map<std::string, std::deque<NcclResult>> answers_ GUARDED_BY(mutex_);
  std::set<std::string> blocked_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
