// The store of one view of an elastic job as torch knows stores: served by the view's first member.
//
// Owner: torch's tables, and whoever forms groups in the view. Threads: any. It ends with its view,
// and with the member, which it does not keep: every call then throws c10::DistStoreError. get()
// and wait() block up to the timeout.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "elastic/elastic_member.h"

namespace torchft_ext {

class MemberStore : public c10d::Store {
 public:
  using Bytes = std::vector<uint8_t>;
  using Keys = std::vector<std::string>;

  MemberStore(std::weak_ptr<ElasticMember> member, uint64_t view)
      : member_(std::move(member)), view_(view) {}

  // The same store, with a timeout of its own.
  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const Bytes& value) override;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  Bytes get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const Keys& keys) override;
  int64_t getNumKeys() override;
  void wait(const Keys& keys) override;
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const Bytes& value) override;
  std::vector<Bytes> multiGet(const Keys& keys) override;
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override;
  bool hasExtendedApi() const override { return true; }

 private:
  StoreCall make(StoreCall::What what, const std::string& key) const;
  StoreAnswer call(StoreCall call, std::chrono::milliseconds limit) const;

  const std::weak_ptr<ElasticMember> member_;
  const uint64_t view_;
};

}  // namespace torchft_ext
