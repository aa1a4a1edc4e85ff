// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Which queue pairs of a HCA are attached to which groups. Uses the `kernel` crate's vector only.

use kernel::prelude::*;

struct Group<T> {
    mgid: [u8; 16],
    mlid: u16,
    members: KVec<T>,
}

/// The groups of a HCA.
pub(crate) struct Groups<T>(KVec<Group<T>>);

impl<T> Groups<T> {
    pub(crate) const fn new() -> Self {
        Self(KVec::new())
    }

    fn find(&mut self, mgid: &[u8; 16], mlid: u16) -> Option<usize> {
        self.0
            .iter()
            .position(|group| group.mlid == mlid && group.mgid == *mgid)
    }

    /// Adds a member; false if it is one already.
    pub(crate) fn attach(
        &mut self,
        mgid: [u8; 16],
        mlid: u16,
        member: T,
        same: impl Fn(&T, &T) -> bool,
    ) -> Result<bool> {
        let at = match self.find(&mgid, mlid) {
            Some(at) => at,
            None => {
                self.0.push(
                    Group {
                        mgid,
                        mlid,
                        members: KVec::new(),
                    },
                    GFP_ATOMIC,
                )?;
                self.0.len() - 1
            }
        };
        let Some(group) = self.0.get_mut(at) else {
            return Ok(false);
        };
        if group.members.iter().any(|have| same(have, &member)) {
            return Ok(false);
        }
        group.members.push(member, GFP_ATOMIC)?;
        Ok(true)
    }

    /// Takes a member out; false if it was none.
    pub(crate) fn detach(&mut self, mgid: [u8; 16], mlid: u16, is: impl Fn(&T) -> bool) -> bool {
        let Some(at) = self.find(&mgid, mlid) else {
            return false;
        };
        let Some(group) = self.0.get_mut(at) else {
            return false;
        };
        let before = group.members.len();
        group.members.retain(|member| !is(member));
        let found = group.members.len() != before;
        if group.members.is_empty() {
            self.0.retain(|group| !group.members.is_empty());
        }
        found
    }

    /// Takes a member out of all groups; says of how many it was one.
    pub(crate) fn detach_all(&mut self, is: impl Fn(&T) -> bool) -> usize {
        let mut found = 0;
        for group in self.0.iter_mut() {
            let before = group.members.len();
            group.members.retain(|member| !is(member));
            found += before - group.members.len();
        }
        self.0.retain(|group| !group.members.is_empty());
        found
    }

    /// The members of a group.
    pub(crate) fn members(&self, mgid: &[u8; 16], mlid: u16) -> &[T] {
        self.0
            .iter()
            .find(|group| group.mlid == mlid && group.mgid == *mgid)
            .map_or(&[], |group| &group.members)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(CONFIG_IBF_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ibf_mcast)]
mod tests {
    use super::*;

    const MGID: [u8; 16] = [0xff; 16];

    #[test]
    fn members_come_and_go() -> Result {
        let mut groups = Groups::new();
        let same = |a: &u32, b: &u32| a == b;
        assert!(groups.attach(MGID, 0xc000, 1, same)?);
        assert!(!groups.attach(MGID, 0xc000, 1, same)?);
        assert!(groups.attach(MGID, 0xc000, 2, same)?);
        assert!(groups.attach(MGID, 0xc001, 2, same)?);
        assert_eq!(groups.members(&MGID, 0xc000), &[1, 2]);
        assert_eq!(groups.members(&MGID, 0xc002), &[] as &[u32]);
        assert_eq!(groups.members(&[0; 16], 0xc000), &[] as &[u32]);
        assert!(groups.detach(MGID, 0xc000, |&member| member == 1));
        assert!(!groups.detach(MGID, 0xc000, |&member| member == 1));
        assert_eq!(groups.len(), 2);
        assert_eq!(groups.detach_all(|&member| member == 2), 2);
        assert_eq!(groups.len(), 0);
        Ok(())
    }
}
