// The view that a proposer suggests where nothing binds it. Pure functions.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "elastic/elastic_message.h"
#include "elastic/proposal.h"
#include "elastic/view.h"

namespace torchft_ext {

// Of the promisers that would stay, who has to go so that no two are left that cannot connect: a
// learner before a voter; then the one with the most such pairs; then the one that joined later (of
// one view: of the higher rank). `going`: who goes anyway.
std::set<MemberId> losersOfPairs(const View& base, const std::map<MemberId, Promise>& promises,
                                 const std::set<MemberId>& going);

// Members: the promisers that are not gone and stay, in the order of `base`; then newcomers that
// they know and that none of them holds back, up to max_size. Witness: the store that the promisers
// reach. Voters: those who are voters of `base`; its learners too where one of its agreements was
// ok.
//
// A promiser that is not ready stays, unless another one calls it absent and those that are ready
// can go on without all such: they are more than half of those that vote (half is enough in a view
// that names a witness), they are min_size at least, and hold a copy of every shard that one of the
// absent holds.
View nextView(const View& base, const std::map<MemberId, Promise>& promises,
              const std::set<MemberId>& gone, const ElasticRules& rules);

}  // namespace torchft_ext
