#include "agreement.h"

#include <stdexcept>

#include "elastic/elastic_member.h"
#include "file_job_store.h"

namespace torchft_ext::bench {
namespace {

constexpr std::chrono::seconds kLong{60};
constexpr int kBlock = 50;

std::shared_ptr<ElasticMember> join(const Member& member) {
  ElasticOptions options;
  options.job = "bench";
  options.size = member.size;
  options.rules.max_size = member.size;
  options.bind_address = *SocketAddress::fromNumeric("127.0.0.1", 0);
  options.store = fileJobStore(member.arguments.directory + "/job");
  options.prefix = "job/";
  return ElasticMember::join(options, Deadline::after(kLong));
}

void agree(ElasticMember& elastic, uint64_t view) {
  Vote vote;
  vote.ok = true;
  if (!elastic.agree(view, vote, Deadline::after(kLong)).ok) {
    throw std::runtime_error("all members said ok, and the answer is another");
  }
}

template <typename Call>
void timeBlock(std::vector<double>& times, const Call& call) {
  for (int i = 0; i < kBlock; ++i) {
    const auto began = BenchClock::now();
    call();
    times.push_back(microseconds(BenchClock::now() - began));
  }
}

}  // namespace

Row measureAgree(const Member& member) {
  const auto elastic = join(member);
  const uint64_t view = elastic->awaitView(0, Deadline::after(kLong)).number;
  std::vector<double> agreements;
  std::vector<double> barriers;
  for (int i = 0; i <= member.arguments.rounds; ++i) {
    if (i == 1) agreements.clear(), barriers.clear();  // the first ones warm up
    timeBlock(agreements, [&] { agree(*elastic, view); });
    timeBlock(barriers, [&] { member.comm.barrier().wait(); });
  }
  elastic->leave(Deadline::after(kLong));
  Row row;
  row.op = "agree";
  row.more = {{"barriers", median(agreements) / median(barriers)},
              {"barrier_us", median(barriers)}};
  row.times = std::move(agreements);
  return row;
}

}  // namespace torchft_ext::bench
