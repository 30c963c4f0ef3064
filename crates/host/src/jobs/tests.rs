use std::rc::Rc;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use tokio::sync::mpsc::unbounded_channel;
use tokio::task::LocalSet;

use super::*;
use crate::clock::Instant;
use crate::world::tests::Lonely;
use crate::world::{self, Entered};

fn simulated() -> (LocalSet, Entered) {
    (LocalSet::new(), world::enter(Rc::new(Lonely)))
}

#[test]
fn one_thread_keeps_the_order_and_reports_after_each_job() {
    let threads = Threads::spawn("one", 1, Urgency::Foreground).unwrap();
    let (sender, receiver) = mpsc::channel();
    for number in 0..100 {
        let sender = sender.clone();
        threads.submit(move || number, move |done| sender.send(done).unwrap());
    }
    drop((threads, sender));
    assert_eq!(receiver.iter().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
}

#[test]
fn each_of_many_jobs_is_run_once_and_the_last_before_the_threads_end() {
    let threads = Threads::spawn("four", 4, Urgency::Background).unwrap();
    let (sender, receiver) = mpsc::channel();
    for number in 0..10_000 {
        let sender = sender.clone();
        threads.submit(move || number, move |done| sender.send(done).unwrap());
    }
    drop((threads, sender));
    let mut done: Vec<i32> = receiver.iter().collect();
    done.sort_unstable();
    assert_eq!(done, (0..10_000).collect::<Vec<_>>());
}

#[test]
fn a_job_of_the_background_gives_way() {
    let nice = || {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let behind_the_name = stat.rsplit_once(") ").unwrap().1;
        behind_the_name.split(' ').nth(16).unwrap().parse::<i32>().unwrap()
    };
    let of = |urgency| {
        let (sender, receiver) = mpsc::channel();
        let threads = Threads::spawn("one", 1, urgency).unwrap();
        threads.submit(nice, move |nice| sender.send(nice).unwrap());
        receiver.recv().unwrap()
    };
    assert_eq!(of(Urgency::Foreground), nice());
    assert!(of(Urgency::Background) > nice());
}

#[test]
fn a_strand_keeps_the_order_whoever_runs_its_jobs() {
    let strands = Strands::spawn("strands", 3).unwrap();
    let (sender, receiver) = mpsc::channel();
    for number in 0..3000 {
        let (key, sender) = (number % 5, sender.clone());
        let urgency = if number % 3 == 0 { Urgency::Background } else { Urgency::Foreground };
        strands.submit(key, urgency, move || number, move |done| sender.send(done).unwrap());
    }
    drop((strands, sender));
    let done: Vec<i32> = receiver.iter().collect();
    for key in 0..5 {
        let of_key = done.iter().copied().filter(|number| number % 5 == key);
        assert!(of_key.eq((0..3000).filter(|number| number % 5 == key)));
    }
}

#[test]
fn no_strand_waits_for_another_nor_a_client_for_the_background() {
    let strands = Strands::spawn("strands", 1).unwrap();
    let (hold, held) = mpsc::channel::<()>();
    let (sender, done) = mpsc::channel();
    strands.submit(1, Urgency::Background, move || held.recv(), |_| {});
    for key in [1, 2] {
        let sender = sender.clone();
        strands.submit(key, Urgency::Foreground, move || key, move |key| sender.send(key).unwrap());
    }
    assert_eq!(done.recv_timeout(Duration::from_secs(10)), Ok(2));
    drop(hold);
    assert_eq!(done.recv_timeout(Duration::from_secs(10)), Ok(1));
}

#[test]
fn a_dropped_routine_finishes_and_a_woken_one_works() {
    let (sender, receiver) = mpsc::channel();
    let routine = Routine::spawn("routine", move |is_closing| {
        sender.send(is_closing).unwrap();
        if is_closing { Step::Ended } else { Step::Idle }
    })
    .unwrap();
    assert!(!receiver.recv().unwrap());
    routine.wake();
    assert!(!receiver.recv().unwrap());
    drop(routine);
    assert!(receiver.iter().last().unwrap());
}

#[test]
fn two_things_at_once_and_all_processors() {
    let (other, own) =
        beside("other", || thread::current().id(), || thread::current().id()).unwrap();
    assert_ne!(other, own);
    let jobs = Mutex::new(0..1000);
    let sum = Mutex::new(0);
    on_all_processors(|| {
        while let Some(job) = { jobs.lock().unwrap().next() } {
            *sum.lock().unwrap() += job;
        }
    });
    assert_eq!(sum.into_inner().unwrap(), 499_500);
}

#[tokio::test(start_paused = true)]
async fn simulated_jobs_take_their_time_on_this_thread() {
    let (local, _entered) = simulated();
    let began = Instant::now();
    let (sender, mut reports) = unbounded_channel();
    let jobs = async {
        let threads = Threads::spawn("pair", 2, Urgency::Foreground).unwrap();
        for number in 0..3 {
            let sender = sender.clone();
            let work = move || (number, thread::current().id());
            threads.submit(work, move |done| sender.send((done, began.elapsed())).unwrap());
        }
        for (number, seconds) in [(0, 2), (1, 2), (2, 4)] {
            let ((job, at), took) = reports.recv().await.unwrap();
            assert_eq!((job, at), (number, thread::current().id()));
            assert_eq!(took.as_secs(), seconds);
        }
        let job = run("alone", move || began.elapsed());
        assert_eq!(job.await.unwrap().as_secs(), 5);
    };
    local.run_until(jobs).await;
}

/// A crash of the node: the disk sees what was begun, nobody hears of it, and what waited is gone.
#[tokio::test(start_paused = true)]
async fn a_dropped_node_drops_its_jobs() {
    let (local, _entered) = simulated();
    let (sender, mut done) = unbounded_channel();
    let jobs = async {
        let threads = Threads::spawn("one", 1, Urgency::Foreground).unwrap();
        for number in 0..2 {
            let (work, report) = (sender.clone(), sender.clone());
            threads.submit(
                move || work.send((number, "work")).unwrap(),
                move |()| report.send((number, "report")).unwrap(),
            );
        }
        let steps = sender.clone();
        let routine = Routine::spawn("routine", move |_| {
            steps.send((0, "step")).unwrap();
            Step::Idle
        });
        tokio::time::sleep(Duration::from_millis(1500)).await;
        (threads, routine)
    };
    let (threads, routine) = local.run_until(jobs).await;
    drop((routine, local, threads, sender));
    let mut seen = Vec::new();
    while let Some(event) = done.recv().await {
        seen.push(event);
    }
    assert_eq!(seen, [(0, "work"), (0, "step")]);
}
