// How is that job? Asked by a process that takes no part in it: it finds the members as a newcomer
// does, proves that it knows the job's secret, and asks one of them. It takes no place and changes
// nothing.
//
//   store, or a listed member -> founding and contacts
//   contacts, one after the other, a moment apart, until a member answers -> its report
//   the other members' ports: do they answer? (net/probe.h)
//   store -> what its register holds
//
// Owner: the asking thread, which alone uses it. Its own threads are ft-inquiry and ft-jobstore;
// the destructor ends them, within two seconds. Blocks up to the deadline; throws what `cancelled`
// throws, and nothing else.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "elastic/cancellable_wait.h"
#include "elastic/job_report.h"
#include "elastic/job_store.h"
#include "elastic/listed_store.h"
#include "net/probe.h"

namespace torchft_ext {

struct InquiryOptions {
  std::string job;              // its name
  ComparingStoreFactory store;  // empty: the job has none
  std::string prefix;           // of the job's keys in it
  ListedAddresses listed;       // where members are looked for, instead; empty: in the store
  std::string key;              // with `listed`
};

// What the place where the job is found holds.
struct MeetingState {
  std::string trouble;  // why it could not be read; empty: it was
  size_t come = 0;      // fresh processes, before the founding
  std::optional<Founding> founding;
  std::vector<Member> contacts;                         // of a late view; empty: of the first
  std::optional<JobStore::RegisterState> register_now;  // of the view's lineage; of a store only
};

struct JobState {
  MeetingState meeting;
  std::optional<JobReport> report;                     // nothing: no member answered
  std::vector<std::pair<Member, std::string>> silent;  // were asked and gave no report, and why
  std::map<MemberId, ProbeAnswer> heard;               // of the report's members, but who reported
};

class JobInquiry {
 public:
  explicit JobInquiry(InquiryOptions options);
  ~JobInquiry();
  JobInquiry(const JobInquiry&) = delete;
  JobInquiry& operator=(const JobInquiry&) = delete;

  JobState ask(Deadline deadline, const Cancelled& cancelled = {});

 private:
  struct Course;
  const std::shared_ptr<Course> course_;
};

}  // namespace torchft_ext
