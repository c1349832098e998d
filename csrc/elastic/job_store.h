// The keys of an elastic job in the store that its processes share: its founding, its members'
// addresses, and the witness's register. Plain calls; each blocks for as long as the store takes.
//
// Keys, below the job's prefix:
// clang-format off
//   seats              number of fresh processes that have come
//   seat/<i>           the i-th of them; missing if that process died before it wrote the key
//   founding           the rules, the first view, and the key that admits to its members'
//                      connections; the first process to write it founds the job
//   contacts           addresses of the members of a recent view: a hint
//   end/<lineage>      when the job of that lineage ended well, and by how many members. The first
//                      one that is written counts. No decision is made by it.
//   witness/<lineage>  the register of that lineage: the store's identity in it, and the view that
//                      the store last voted for. A writer has to name the present value. So a store
//                      that restarted empty has no vote, and neither has one whose register says
//                      that a later number has been decided.
// clang-format on
//
// Owner: an ElasticMember, on one thread. Every call throws StoreError.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "elastic/member_keys.h"
#include "elastic/proposal.h"
#include "membership/store_client.h"

namespace torchft_ext {

struct Founding {
  ElasticRules rules;
  JobKey key;
  View view;
};

// That a job has ended well.
struct JobEnd {
  std::chrono::system_clock::time_point at;  // by the clock of the member that recorded it
  uint32_t members = 0;                      // of the last view
  std::string describe() const;              // "ended at 2026-01-31 12:00:00 UTC by 3 members"
};

std::string encodeFounding(const Founding& founding);
std::string keyOfEnd(const Founding& founding);  // below the job's prefix
std::string encodeEnd(const JobEnd& end);
std::string encodeMembers(const std::vector<Member>& members);

class JobStore {
 public:
  // may_witness: what is founded there has it as its witness.
  JobStore(ComparingStoreFactory factory, std::string prefix, bool may_witness = true)
      : factory_(std::move(factory)), prefix_(std::move(prefix)), may_witness_(may_witness) {}

  std::optional<Founding> founding();
  // The founding that stands; the witness's identity is set in its view.
  Founding found(Founding proposed);
  size_t takeSeat(const Member& self);  // its number
  bool hasSeat(size_t seat, const Member& self);
  void giveUpSeat(size_t seat, const Member& self);  // it takes one more process then
  size_t seatsTaken();
  std::vector<Member> seats(size_t most);  // the first so many that are there
  std::vector<Member> contacts();
  void setContacts(const std::vector<Member>& members);
  // Of a member of that founding's job: puts back what a store that restarted empty lacks, so that
  // newcomers find the job, and no second one is founded in its place. The store's identity to that
  // lineage; zero: it serves another job under this name.
  WitnessId restore(const Founding& founding, const Lineage& lineage,
                    const std::vector<Member>& members);
  // Of that founding's job, whichever lineage it ended in. A store that has restarted empty since
  // then has forgotten it.
  std::optional<JobEnd> end(const Founding& founding);
  // Of a member, after an agreement on the end that was ok: first restores what newcomers look for.
  // False: the store serves another job under this name.
  bool recordEnd(const Founding& founding, const View& last, const JobEnd& end);
  // What the register of that lineage holds. Nothing: there is none, or it makes no sense.
  struct RegisterState {
    WitnessId identity;      // of the store, to that lineage
    uint64_t voted_for = 0;  // the number of the view that it voted for last; 0: none
  };
  std::optional<RegisterState> registerState(const Lineage& lineage);
  // As the witness, or under the store's rule. Throws, too, where its identity is another one.
  WitnessReply ask(const WitnessRequest& request);

 private:
  struct Register {
    WitnessId identity;
    std::optional<AcceptedView> held;
    std::string bytes;  // as it stands
  };
  ComparingStore& store();
  template <typename Call>
  std::invoke_result_t<Call> guarded(const Call& call);
  std::optional<std::string> get(const std::string& key);
  std::string first(const std::string& key, const std::string& value);
  // Drawn, where the lineage has no register yet.
  WitnessId identityTo(const Lineage& lineage);
  std::optional<Register> readRegister(const Lineage& lineage);
  bool writeRegister(const Register& found, const AcceptedView& held);
  WitnessReply claim(const WitnessRequest& request, const Register& found, WitnessReply reply);
  WitnessReply decide(const WitnessRequest& request, const Register& found, WitnessReply reply);

  const ComparingStoreFactory factory_;
  const std::string prefix_;
  const bool may_witness_;
  std::unique_ptr<ComparingStore> store_;  // made at first use, and anew after an error
};

}  // namespace torchft_ext
