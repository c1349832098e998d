// What a member does on its own loop: events go to the protocol's core, and what the core wants
// done is done here, with the member's connections, its stores and the view's store.
//
// Owner: its ElasticMember, which is its only user; for ever itself, where a thread of its does not
// end. Threads: the loop's only ("ft-elastic"), but for start() on the joining thread, and stop(),
// untilOnLoop() and the status on any. After stop() nothing happens any more: network and core are
// gone. It never blocks its loop: the stores have threads of their own.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/task_thread.h"
#include "elastic/admission.h"
#include "elastic/elastic_core.h"
#include "elastic/elastic_options.h"
#include "elastic/job_founder.h"
#include "elastic/job_store_thread.h"
#include "elastic/meeting_links.h"
#include "elastic/meeting_server.h"
#include "elastic/member_network.h"
#include "elastic/member_status.h"
#include "elastic/sole_holders.h"
#include "elastic/view_store_client.h"
#include "elastic/way_probes.h"
#include "net/event_loop.h"

namespace torchft_ext {

// Of the listed members, by the last look at them. Written on the store's thread.
struct UnansweredAddresses {
  Mutex mutex;
  std::string addresses GUARDED_BY(mutex);  // with the reasons; empty: all answer
};

struct MemberDriver : std::enable_shared_from_this<MemberDriver> {
  static constexpr milliseconds kTick{20};

  explicit MemberDriver(ElasticOptions given);

  std::unique_ptr<JobStoreThread> makeListed();
  // Where the job is founded and found.
  JobStoreThread& meeting() { return listed ? *listed : store; }
  // ---- the joining thread
  void start(Deadline deadline, const Cancelled& cancelled);
  void listen(Deadline deadline);
  void openPlace();
  // ---- any thread
  void stop();
  bool untilOnLoop(const std::function<bool()>& done, Deadline deadline);

  MemberNetwork::Events events();
  std::string differenceFrom(const Founding& known) const;
  void begin(const JobFounder::Place& found);
  void openInquiries();
  JobReport report() const;
  std::vector<ReportedMember> reportWaiting() const;
  void carryOut(const ElasticEffects& effects);
  void tellStopped(uint64_t view_number, const std::string& why);
  void sendAll(const std::vector<ElasticEnvelope>& sends);
  void restoreStore();
  void lookForContacts();
  void hearContacts(const std::vector<Member>& members, const std::optional<JobEnd>& end);
  void askWitness(const WitnessRequest& request);
  // trouble: why it has not answered; empty: it has.
  void hearWitness(const WitnessReply& reply, const std::string& trouble,
                   Clock::time_point asked_at);
  void noteEnd();  // of a member that is gone for good
  // So many are gone for good that there will be no quorum, and that will not change.
  bool isHopeless(const ElasticEffects& effects) const;
  void onMessage(const MemberId& from, const FrameHeader& header, const std::string& payload);
  void onElastic(const MemberId& from, const std::string& payload);
  void logRefused(const std::string& whose, const std::string& why);
  void onCall(const MemberId& from, uint64_t number, const std::string& payload);
  void onLost(const MemberId& id, Loss loss, const std::string& how);
  // Tells the core, unless it is a sole holder that is waited for.
  void lose(const MemberId& id, Loss loss);
  // Of who has parted before nobody tells any more.
  void watchForming(bool now);
  // Of a loss that is final, in words.
  std::string endOf(const MemberId& id, Loss loss) const;
  // The attempt to form the view is over, if that member is in it.
  void stopForming(const MemberId& lost, const std::string& how);
  // These pairs of a view's members could not connect, and the view came to nothing for that.
  void noteCut(const std::set<MemberPair>& pairs);
  void noteBroken(const MemberId& id);
  void tellKeptApart(const std::string& hosts, const std::string& why) const;
  // Of a newcomer: probes to those that it has to reach; and where it has waited for long, a line
  // in the log that says whom it does not reach.
  void probeWays();
  void sendProbe(const MemberId& to, const std::string& padding);
  void onProbe(const MemberId& from, const ElasticMessage& probe);
  void onProbed(const MemberId& from, const ElasticMessage& answer);
  void loseWay(const MemberId& id);
  void holdBack();  // tells the core which newcomers are not to be taken in yet
  void onNewView();
  void tellClients();
  void tick();
  void arm();
  void sendCall(const MemberId& host, uint64_t number, const StoreCall& call);
  void replyTo(const MemberId& to, uint64_t number, const StoreAnswer& answer);
  void publish();
  std::set<MemberId> known() const;
  bool isNeeded() const;

  const ElasticOptions options;
  MemberStatus status;
  EventLoop loop;
  std::shared_ptr<MeetingLinks> links;  // loop
  const std::shared_ptr<UnansweredAddresses> unanswered = std::make_shared<UnansweredAddresses>();
  JobStoreThread store;                          // of the witness
  const std::unique_ptr<JobStoreThread> listed;  // null: the members meet in the store
  TaskThread stop_thread;                        // on_stopped may block
  std::shared_ptr<MemberDriver> keep_alive;
  // Loop.
  std::unique_ptr<MemberNetwork> network;
  std::unique_ptr<MeetingServer> place;  // where others find this process; null: in the store alone
  std::unique_ptr<MeetingServer> inquiries;  // how the job is
  std::optional<ElasticCore> core;
  ViewStoreServer server;
  ViewStoreClient client;
  EventLoop::TimerId timer = 0;
  int ticks = 0;
  bool witness_busy = false;
  Clock::time_point last_end;  // when it was last told that a member is gone for good
  // By the store's rule: the store's last answer is so late after that, that no write of that
  // member is on its way any more.
  bool stays_undecided = false;
  bool restoring = false;
  int looks_spared = 0;  // at a store that has failed, which may hold up its thread
  Founding founding;     // the job's
  bool ending = false;
  bool forming = false;
  std::set<MemberId> gone_soon;
  std::set<MemberId> unreachable;  // and not connected again since
  SoleHolders sole_holders;
  Admission admission;
  WayProbes ways;
  Clock::time_point began{};
  bool told_unreached = false;
  bool unpublished = false;  // newcomers do not find this view's members yet
  int looks_without_members = 0;
  std::set<MemberId> before;      // of the view before: who is left out has to be told
  std::set<std::string> refused;  // whose word was not believed in this view, as the log names them
};

}  // namespace torchft_ext
